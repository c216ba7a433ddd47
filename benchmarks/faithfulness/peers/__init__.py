"""Other libraries, a file each: ``METHODS`` maps a row's title to a function of a problem."""

PEERS = {  # module -> package
    "loss": "torch",
    "cleanlab": "cleanlab",
    "captum": "captum",
    "trak": "traker",
    "laplace_torch": "laplace-torch",
    "kronfluence": "kronfluence",
    "pydvl": "pyDVL",
    "dattri": "dattri",
}
