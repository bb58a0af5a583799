"""libucmclient_cuda for a test without a GPU: builds tests/engines/vllm/fake_copy_agent.c, and uses
it in place of the real one."""

import ctypes
import os
import subprocess
import tempfile
from unittest import mock

from ucmclient import _native, copy_agent

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def named(path):
    """An environment in which the library is looked for there. Forgets the one found before."""
    copy_agent._library.cache_clear()
    return mock.patch.dict(os.environ, {"UCMCLIENT_CUDA_LIB": path})


class Fake:
    def __init__(self, case):
        """For as long as that test runs."""
        directory = tempfile.TemporaryDirectory()
        case.addCleanup(directory.cleanup)
        path = os.path.join(directory.name, copy_agent.SONAME)
        subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-I", os.path.join(TOP, "client/include"),
                        os.path.join(TOP, "tests/engines/vllm/fake_copy_agent.c"), os.path.realpath(_native.lib._name), "-o", path],
                       check=True)
        environment = named(path)
        environment.start()
        case.addCleanup(copy_agent._library.cache_clear)
        case.addCleanup(environment.stop)
        self._library = ctypes.CDLL(path)

    def refuse(self, open=0, register=0):
        """With these statuses."""
        (ctypes.c_int * 2).in_dll(self._library, "fake_refusals")[:] = [open, register]

    @property
    def copy_agents(self):
        """How many there are now."""
        return ctypes.c_int.in_dll(self._library, "fake_copy_agents").value

    def calls(self):
        """Since the last time: a letter each."""
        told = (ctypes.c_char * 4096).in_dll(self._library, "fake_calls")
        calls, told.raw = told.value.decode(), bytes(4096)
        return calls
