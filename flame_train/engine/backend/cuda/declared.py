"""Compiles the text of a kernel where NVRTC is installed, with or without a GPU, so that a mistake is told early."""

from __future__ import annotations

import ctypes

from ....errors import EnvironmentFault
from .loading import header_directory, load
from .nvrtc import TEXT_OPTIONS, included

_OPTIONS = (*TEXT_OPTIONS, "-default-device", "-arch=compute_90")  # what all cards that matter have, and more


def compiler_log(text: str) -> str:
    """What NVRTC says of a text that does not compile; "" if it does, or if NVRTC or CUDA's headers are not here."""
    try:
        library, headers = load("nvrtc"), header_directory()
    except (ImportError, EnvironmentFault):
        return ""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    given = [option.encode() for option in (*_OPTIONS, f"-I{headers}")]
    library.nvrtcCreateProgram(ctypes.byref(program), included(text).encode(), b"kernel.cu", 0, None, None)
    try:
        if not library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given)):
            return ""
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        said = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, said)
        return said.value.decode(errors="replace")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
