"""A wheel with the library in it belongs to a platform, but to no version of Python."""

import os

from setuptools import setup
from setuptools.dist import Distribution

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70
    from wheel.bdist_wheel import bdist_wheel

BUNDLED = os.path.exists(os.path.join(os.path.dirname(os.path.abspath(__file__)), "ucmclient", "libucmclient.so.0"))


class Tagged(bdist_wheel):
    def get_tag(self):
        return ("py3", "none", super().get_tag()[2]) if BUNDLED else super().get_tag()


class Bundle(Distribution):
    def has_ext_modules(self):
        return BUNDLED


setup(distclass=Bundle, cmdclass={"bdist_wheel": Tagged})
