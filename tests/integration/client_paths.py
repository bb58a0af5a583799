"""Where ucmclient, its examples and its library are found. Import it before ucmclient."""

import os
import pathlib
import sys

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "client/python"), str(TOP / "client/python/examples")]
if (TOP / "build").exists():  # elsewhere the library lies beside the package
    os.environ.setdefault("UCMCLIENT_LIB", str(TOP / "build/libucmclient.so"))
