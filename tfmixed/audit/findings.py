"""A finding of the audit: what is wrong, where, and how to fix it."""

import dataclasses
import difflib

from tfmixed.audit.codes import CODES
from tfmixed.audit.codes import SEVERITIES


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that the audit found.

    Args:
        code: Stable code, such as `"TM001"`; a key of `codes.CODES`.
        severity: `"error"`, `"warning"` or `"note"`.
        layer: Path of the layer, as the rows of the audit name it; None for
            what concerns the whole model.
        message: What is wrong, with names, dtypes and values.
        fix: What to do about it.
    """

    code: str
    severity: str
    layer: str | None
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.code} {self.severity}: {self.message} {self.fix}"


def finding(
    code: str,
    layer: str | None,
    message: str,
    fix: str | None = None,
    severity: str | None = None,
) -> Finding:
    """Makes a finding; what is left out comes from the table of codes.

    Args:
        code: A key of `codes.CODES`.
        layer: Path of the layer, or None for the whole model.
        message: What is wrong, with names, dtypes and values.
        fix: What to do about it.
        severity: `"error"`, `"warning"` or `"note"`.

    Returns:
        The `Finding`.

    Raises:
        ValueError: For an unknown code or severity.

    Example:

    >>> finding("TM011", None, "The model runs eagerly.").severity
    'warning'
    """
    if code not in CODES:
        close = difflib.get_close_matches(str(code), CODES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"Unknown code {code!r}.{hint} Expected a key of "
            "tfmixed.audit.codes.CODES."
        )
    entry = CODES[code]
    severity = entry.severity if severity is None else severity
    if severity not in SEVERITIES:
        raise ValueError(
            f"Unknown severity {severity!r} of a finding {code}. Expected one "
            f"of {', '.join(map(repr, SEVERITIES))}."
        )
    return Finding(
        code, severity, layer, message, entry.fix if fix is None else fix
    )
