"""Loss from parameters and tokens, L(N, D) = E + A / N^a + B / D^b, and what follows from it.

Hoffmann et al. 2022 (arXiv 2203.15556, appendix D.3, approach 3) fitted it; Besiroglu et al. 2024 (arXiv 2404.10102,
section 3) found the printed coefficients off their own data and fitted them anew. Both are laws of those authors' data,
tokenizer and recipe: differences between losses carry over to other data, levels don't. Hoffmann's coefficients stand
here with the digits of the paper's source; the paper prints them rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import PhalanxError


@dataclass(frozen=True, slots=True)
class ScalingLaw:
    """Nats a token: irreducible + by_parameters / N^parameter_power + by_tokens / D^token_power."""

    irreducible: float
    by_parameters: float
    parameter_power: float
    by_tokens: float
    token_power: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Expected loss, nats a token."""
        left = self.by_parameters / parameters**self.parameter_power
        return float(self.irreducible + left + self.by_tokens / tokens**self.token_power)

    def floor(self, parameters: float) -> float:
        """The loss that a model of this size nears with tokens without end."""
        return float(self.irreducible + self.by_parameters / parameters**self.parameter_power)

    def tokens_to(self, loss: float, parameters: float) -> float:
        """Tokens until a loss. Raises PhalanxError for one that a model of this size never reaches."""
        floor = self.floor(parameters)
        if loss <= floor:
            raise PhalanxError(
                "loss",
                value=loss,
                expected=f"more than {floor:.4f}, which {parameters:.3g} parameters only near with tokens without end",
                remedy="take a larger model or a higher loss",
            )
        return float((self.by_tokens / (loss - floor)) ** (1 / self.token_power))

    def best_split(self, operations: float) -> tuple[float, float]:
        """(parameters, tokens) of the least loss for a budget of 6 N D operations (Hoffmann et al. 2022, equation
        4)."""
        powers = self.parameter_power + self.token_power
        balance = self.parameter_power * self.by_parameters / (self.token_power * self.by_tokens)
        parameters = balance ** (1 / powers) * (operations / 6) ** (self.token_power / powers)
        return float(parameters), float(operations / 6 / parameters)


HOFFMANN_2022 = ScalingLaw(1.6934, 406.4, 0.3392, 410.7, 0.2849)
BESIROGLU_2024 = ScalingLaw(1.8172, 482.01, 0.3478, 2085.43, 0.3658)
SCALING_LAWS = {"hoffmann-2022": HOFFMANN_2022, "besiroglu-2024": BESIROGLU_2024}


def law_named(name: str) -> ScalingLaw:
    """A law by its name. Raises PhalanxError for an unknown one."""
    if name not in SCALING_LAWS:
        raise PhalanxError(
            "scaling law", value=name, expected=f"one of {', '.join(SCALING_LAWS)}", remedy="choose one of them"
        )
    return SCALING_LAWS[name]
