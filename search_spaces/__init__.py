"""What may vary: parameters, conditions, chains of slots. Imported as `autotune.search_spaces`."""

if __name__ != "autotune.search_spaces":
    raise ImportError(f"import autotune.search_spaces, not {__name__}: a second copy would have its own INVALID and INACTIVE")

from autotune.search_spaces.parameters import (
    INACTIVE,
    INVALID,
    Boolean,
    Categorical,
    Conditional,
    ConditionalDefault,
    Parameter,
    order_parents_first,
    parameter_from_json,
    same,
    value_key,
)
from autotune.search_spaces.space import (
    Alternative,
    Point,
    Rule,
    Slot,
    Space,
    Wish,
    compile_space,
    draw_points,
    enumerate_points,
    neighbours,
    point_key,
    walk,
)

__all__ = [
    "INACTIVE",
    "INVALID",
    "Alternative",
    "Boolean",
    "Categorical",
    "Conditional",
    "ConditionalDefault",
    "Parameter",
    "Point",
    "Rule",
    "Slot",
    "Space",
    "Wish",
    "compile_space",
    "draw_points",
    "enumerate_points",
    "neighbours",
    "order_parents_first",
    "parameter_from_json",
    "point_key",
    "same",
    "value_key",
    "walk",
]
