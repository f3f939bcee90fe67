"""`phalanx demo`: the whole main job on this machine, with a loss of a rank, a change of layout, and the proof that
nothing was lost.
"""

from phalanx.cli.demo.command import register

__all__ = ["register"]
