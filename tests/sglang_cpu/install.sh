#!/usr/bin/env bash
# Real SGLang in a virtual environment of its own that runs without a GPU: about 11 GB, 3 to 5 minutes.
# usage: install.sh VENV       A venv that is complete is left alone.
set -euo pipefail
venv=${1:?usage: install.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
version=0.5.23
[[ -f $venv/.sglang-$version-ready ]] && exit 0
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet "sglang==$version" accelerate
# the compiled kernels need libcuda; everything else of SGLang stays as released
"$venv/bin/pip" uninstall --quiet --yes sglang-kernel
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
rm -rf "$site/sgl_kernel"
cp -r "$here/shim/sgl_kernel" "$site/sgl_kernel"
touch "$venv/.sglang-$version-ready"
