"""Makes the table of `docs/settings.md` from the schema: `python -m tests.architecture.settings_table`."""

import re

from app.core.setting_texts import to_json_value
from app.settings import Settings
from tests.architecture.source import ROOT

PAGE = ROOT / "docs" / "settings.md"
HEAD = "| Variable | Default | Takes effect | Meaning |\n|---|---|---|---|\n"
TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)*?(?=\| `PACELINE_OPENBLAS`)")
FELT = {"now": "now", "reload": "next load", "restart": "restart"}


VARIABLES = {f"PACELINE_{name.upper()}": field for name, field in Settings.model_fields.items()}


def settings_table() -> str:
    """Return the table, with its rows in the order of the schema."""
    rows = []
    for variable, field in VARIABLES.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        default = to_json_value(field.get_default(call_default_factory=True))
        shown = (
            ""
            if default in (None, "", [], {})
            else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        )
        unit = f" ({extra['unit']})" if extra["unit"] else ""
        description = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{variable}` | {shown} | {FELT[str(extra['takes_effect'])]} | {description}{unit} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: settings_table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
