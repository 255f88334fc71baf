"""Loading while computing: `python -m verify.bench.gpu.overlap --help`.

`cases` says what is measured, `layers` computes, `steps` loads and times a step; `measure` brings them together and
fills what `record` describes. `report` reads results, and holds them against `pipeline`, which only predicts.
"""
