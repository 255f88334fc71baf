"""The benchmark of the GPU backends: `python -m verify.bench.gpu --help`.

`cases` says what is measured, as tables; `rig` knows what every byte must be, `clock` how long it takes; `measure`
brings them together; `results` keeps rows; `report` and `targets` read them. Without a GPU everything runs on platform
"emulated", at toy sizes.
"""
