"""decode.py's result as text."""


def show(result):
    pass
