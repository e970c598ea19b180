"""Models of other libraries with quantized weights: `linen`, `nnx` and `equinox`, each needing that library alone.

Quantizing is `eformer.ops.quantization.quantize_tree` for all of them, and any function runs with dispatch on inside
`eformer.jaximus.implicit`. The modules here add what each library needs beyond that.
"""
