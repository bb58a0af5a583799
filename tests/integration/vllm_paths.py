"""For the tests of the vLLM connector: where the connector, the small engine of tests/engines/vllm and, without a real vLLM, its stub are found.
Import it first."""

import os
import sys

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(TOP, "client/python"), os.path.join(TOP, "tests/engines/vllm")]
if "UCM_REAL_VLLM" not in os.environ:  # its own KVConnectorBase_V1 otherwise
    sys.path.insert(0, os.path.join(TOP, "tests/engines/vllm/stub"))
if os.path.isdir(os.path.join(TOP, "build")):
    os.environ.setdefault("UCMCLIENT_LIB", os.path.join(TOP, "build/libucmclient.so"))
