"""What the words of the command line take, where it is long: kept out of `app/cli.py`. Imported at every start."""

from pathlib import Path
from typing import Annotated

import typer

Host = Annotated[
    str | None, typer.Option(help="Address to listen on (default: 127.0.0.1); other than loopback requires a key.")
]
Port = Annotated[int | None, typer.Option(help="Port to listen on (default: 8710); 0 picks a free one.")]
ModelFolders = Annotated[list[Path] | None, typer.Option(help="Model folder; repeatable. Adds to PACELINE_MODEL_DIRS.")]
Drafts = Annotated[
    list[str] | None, typer.Option(help="main=a+b: the drafters of a main model, or main=off. Repeatable.")
]
SpeculativeJson = Annotated[
    str | None,
    typer.Option(help='vLLM\'s JSON: \'{"method": "dflash", "model": "…", "num_speculative_tokens": 7}\'.'),
]
Policy = Annotated[
    str | None,
    typer.Option(help="When to draft: single (only one request running; default), auto (whenever faster), off."),
]
Acceptance = Annotated[
    str | None, typer.Option(help="Acceptance rule: coupled (exact: same seed, same text) or rejection.")
]
Repository = Annotated[str, typer.Argument(help="organisation/name on the Hugging Face hub.")]
Revision = Annotated[str, typer.Option(help="Branch, tag or commit; default: the latest.")]
