"""Influences and self-influences by engram and by other libraries, a file each.

``PAIRS`` of a module maps a title to the influence of every training example on every test
example, ``OWN`` to one number or vector for every training example. Each is a whole call: from the
trained net to the numbers.
"""

MODULES = {  # module -> package
    "ours": "engram",
    "plain": "torch",
    "kronfluence": "kronfluence",
    "laplace_torch": "laplace-torch",
    "dattri": "dattri",
    "pydvl": "pyDVL",
    "captum": "captum",
    "trak": "traker",
}
