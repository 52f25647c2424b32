"""Field types with bounds, checked by `Config`. Separate from `config`, which must import even in a
broken installation.
"""

import math
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt, MinLen, MultipleOf

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Limit = Annotated[int, Ge(-1)]
"""Limit, -1 if unlimited."""
Zero = Annotated[int, Ge(0), Le(0)]
Even = Annotated[int, Ge(2), MultipleOf(2)]
Amount = Annotated[float, Ge(0)]
Finite = Annotated[float, Ge(0), Lt(math.inf)]
Positive = Annotated[float, Gt(0)]
Rate = Annotated[int | float, Gt(0)]
"""Positive number. A whole one stays an int, also in the configuration's hash."""
Share = Annotated[float, Ge(0), Lt(1)]
Part = Annotated[float, Gt(0), Lt(1)]
Fraction = Annotated[float, Ge(0), Le(1)]
Sizes = tuple[Count, ...]
SomeSizes = Annotated[Sizes, MinLen(1)]
