"""Builds megasetup._C by driving CMake with ninja.

The metadata lives in pyproject.toml; this file exists because the extension is a CMake project, so that the
same CMakeLists.txt serves the Python build, the sanitizer builds and an IDE. Without nvcc the CPU half is built alone.

Environment: CUDACXX or CUDA_HOME name the CUDA compiler; MEGASETUP_CUDA=OFF leaves the GPU half out;
MEGASETUP_CUDA_ARCHITECTURES overrides the GPU architectures (CMake syntax); MAX_JOBS bounds parallel compiles.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def find_nvcc() -> str | None:
    """The CUDA compiler to use: CUDACXX, then CUDA_HOME, then PATH, then /usr/local/cuda; None when there is none."""
    if os.environ.get("MEGASETUP_CUDA", "").upper() in ("0", "OFF"):
        return None
    if "CUDACXX" in os.environ:
        return os.environ["CUDACXX"]
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates = [
        *(os.path.join(home, "bin", "nvcc") for home in homes if home),
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
    ]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


class CMakeBuild(build_ext):
    """One Extension stands for the whole CMake project."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_dir = Path(self.build_temp).resolve() / "cmake"
        build_dir.mkdir(parents=True, exist_ok=True)
        nvcc = find_nvcc()
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(build_dir),
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DMEGASETUP_EXTENSION_DIR={target.parent}",
            f"-DMEGASETUP_EXTENSION_NAME={target.name}",
            f"-DMEGASETUP_CUDA={'ON' if nvcc else 'OFF'}",
        ]
        if nvcc:
            configure.append(f"-DCMAKE_CUDA_COMPILER={nvcc}")
            architectures = os.environ.get("MEGASETUP_CUDA_ARCHITECTURES")
            if architectures:
                configure.append(f"-DCMAKE_CUDA_ARCHITECTURES={architectures}")
        else:
            self.warn("no CUDA compiler found: building the CPU half of megasetup alone (set CUDACXX to change this)")
        subprocess.run(configure, check=True)
        jobs = os.environ.get("MAX_JOBS", str(len(os.sched_getaffinity(0))))
        subprocess.run(["cmake", "--build", str(build_dir), "--target", "_C", "-j", jobs], check=True)


setup(ext_modules=[Extension("megasetup._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
