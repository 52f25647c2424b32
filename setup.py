"""Builds the native kernels; everything else about the package is in pyproject.toml.

The module keeps to Python's stable ABI, so that one wheel serves 3.11 and every later version.
"""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "rayrec.native._kernels",
            sources=sorted(glob("src/rayrec/native/*.c")),
            depends=glob("src/rayrec/native/*.h"),
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra", "-fno-math-errno"],
            libraries=["m"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
