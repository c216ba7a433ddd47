"""The page."""


def page(record):
    return "x"
