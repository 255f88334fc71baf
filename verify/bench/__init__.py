"""The benchmark: model pools × layouts × backends × directions, next to plain copies of the same bytes.

`measure` times and knows nothing of tables; `report` prints what `measure` wrote down. `python -m verify.bench --help`.
"""
