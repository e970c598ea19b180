"""The demonstration: small and real language models, judged in every format. `make demo`, or `python -m demo --help`.

It is not part of the package; run it from a checkout.

>>> from demo import char, text
>>> char.CONFIG.vocabulary, text.decode(text.encode("abc"))
(128, 'abc')
"""
