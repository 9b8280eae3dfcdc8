import dataclasses
import pathlib
import re

import pytest

from tfmixed.audit.codes import CODES
from tfmixed.audit.codes import SEVERITIES
from tfmixed.audit.findings import Finding
from tfmixed.audit.findings import finding

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "audit-codes.md"
STATIC = [f"TM{number:03}" for number in range(1, 21)]
MEASURED = [f"TM{number}" for number in range(101, 108)]


def sections():
    """The sections of the document, by code."""
    found = re.split(r"^## ", DOCUMENT.read_text(), flags=re.M)[1:]
    return {text.split(":")[0]: text for text in found}


def squeezed(text):
    return " ".join(text.split())


def test_codes_are_those_that_were_promised():
    assert list(CODES) == STATIC + MEASURED
    for name, code in CODES.items():
        assert code.code == name
        assert code.severity in SEVERITIES
        assert code.float16 or code.bfloat16
        for text in (code.cause, code.fix):
            assert text.endswith(".")


def test_finding_takes_the_rest_from_the_table():
    one = finding("TM013", None, "Something.")
    assert one == Finding(
        "TM013", "warning", None, "Something.", CODES["TM013"].fix
    )
    other = finding("TM013", "dense", "Something.", "Do it.", "error")
    assert other == Finding("TM013", "error", "dense", "Something.", "Do it.")
    assert str(other) == "TM013 error: Something. Do it."
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.code = "TM001"


def test_unknown_codes_and_severities_are_refused():
    with pytest.raises(ValueError, match="Unknown code 'TM021'. Did you mean"):
        finding("TM021", None, "")
    with pytest.raises(ValueError, match="Unknown severity 'fatal'"):
        finding("TM001", None, "", severity="fatal")


def test_every_code_is_documented_and_no_other():
    assert list(sections()) == list(CODES)


@pytest.mark.parametrize("name", CODES)
def test_document_says_the_same_as_the_table(name):
    code, text = CODES[name], sections()[name]
    assert text.startswith(f"{name}: {code.title}\n")
    body = squeezed(text)
    assert f"**Severity:** {code.severity}." in body
    assert f"**Cause:** {squeezed(code.cause)}" in body
    assert f"**Fix:** {squeezed(code.fix)}" in body
    formats = [f for f in ("float16", "bfloat16") if getattr(code, f)]
    assert f"**Formats:** {', '.join(formats)}." in body
    (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert "# wrong" in example
    assert "# right" in example
    compile(example, name, "exec")
