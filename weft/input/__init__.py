"""Input pipelines, from files on each process to a global batch in the compiled step.

`Input` is the base module. Grain is only imported by the submodules:

- `weft.input.grain`: an input for Grain datasets, and functions for pipelines;
- `weft.input.datasets`: datasets of records;
- `weft.input.text`: sources of packed text;
- `weft.input.grain_lm`, `weft.input.grain_text`: functions for text, packing and conversations;
- `weft.input.composite`, `weft.input.fake`: combined inputs and fake data.
"""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
