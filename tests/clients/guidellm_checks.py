"""guidellm against this server: no request fails, and its figures are those of the server's own metrics.

`MODEL_FOLDER` has the tokenizer. torch and transformers are those of `FURTHER_PACKAGES`, a folder of packages.
"""

from __future__ import annotations

from checks import check, main
from load_checks import documented_agrees, figures_agree


@check
def its_figures_are_the_servers(url: str) -> None:
    figures_agree(url, "guidellm")


@check
def the_documented_command_runs(url: str) -> None:
    documented_agrees(url, "guidellm")


if __name__ == "__main__":
    main()
