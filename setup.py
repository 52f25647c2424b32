"""Builds the native kernels; everything else about the package is in pyproject.toml.

The module keeps to Python's stable ABI, so that one wheel serves 3.11 and every later version.
"""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "rayrec.native._kernels",
            sources=[
                "src/rayrec/native/module.c",
                "src/rayrec/native/click_log.c",
                "src/rayrec/native/vocabulary.c",
                "src/rayrec/native/counting.c",
                "src/rayrec/native/format.c",
                "src/rayrec/native/multi_hot.c",
                "src/rayrec/native/wide_tokens.c",
                "src/rayrec/native/text_columns.c",
                "src/rayrec/native/ready.c",
                "src/rayrec/native/tables.c",
                "src/rayrec/native/table_training.c",
                "src/rayrec/native/dots.c",
                "src/rayrec/native/relu.c",
                "src/rayrec/native/threads.c",
                "src/rayrec/native/checksum.c",
                "src/rayrec/native/ranking.c",
            ],
            depends=glob("src/rayrec/native/*.h"),
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra", "-fno-math-errno"],
            libraries=["m"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
