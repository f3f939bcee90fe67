"""Arguments that several `checkpoint` commands take."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.places import given

Job = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Job file, URL of a job's root (.../projects/P/jobs/NAME), or name of a submitted job.",
        parser=given,
    ),
]
Submitted = Annotated[
    str, typer.Argument(metavar="JOB", help="NAME, PROJECT/NAME or projects/PROJECT/jobs/NAME.", parser=given)
]
Selector = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="`latest`, a step, or a<attempt>-s<step>.")]
ANY_CHECKPOINT = "A live one by STEP or `latest`, any by ATTEMPT/STEP."
