"""Text of Criteo's logs: a label, 13 integers and 26 categories of 8 hexadecimal digits between
tabs, without a header, perhaps without the label.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final, final

from rayrec.data.formats.content import all_lines_match
from rayrec.data.formats.csv import Csv

_LINE: Final = re.compile(
    rb"(?:[01]?\t)?(?:-?[0-9]*\t){13}(?:(?:[0-9a-fA-F]{8})?\t){25}(?:[0-9a-fA-F]{8})?"
)


@final
class Criteo(Csv):
    """Columns of Criteo's schema. A schema with hexadecimal tokens reads them without conversion;
    another one as CSV.
    """

    name: ClassVar[str] = "criteo"

    def recognizes(self, start: bytes) -> bool:
        return all_lines_match(start, _LINE)
