"""What `eformer demo` runs: small and real language models in plain JAX, judged in every format.

>>> from eformer.demo import char, text
>>> char.SHAPE.vocabulary, text.decode(text.encode("abc"))
(128, 'abc')
"""
