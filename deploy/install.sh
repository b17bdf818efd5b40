#!/bin/sh
# Installs parts of the Neuron SDK and NKI Workbench on Ubuntu 24.04 or Debian 12, as root.
#
#   install.sh PART...
#   driver: the kernel module      runtime: the runtime library, collectives and tools
#   python: compiler, NKI and NKI Workbench in $NKW_HOME/venv      nrtpy: nrtpy in $NKW_HOME/nrtpy
#
# Its variables have no defaults; deploy/README.md says what each is. DESTDIR is put before the files that it writes.
set -eu

fail() {
    echo "error: $1" >&2
    exit 2
}

need() {
    for name in "$@"; do
        eval "value=\${$name:-}"
        [ -n "$value" ] || fail "$name is not set; deploy/README.md says what it is"
    done
}

repository() {
    command -v apt-get >/dev/null || fail "apt-get is not here; this script is for Ubuntu 24.04 and Debian 12"
    key="/usr/share/keyrings/neuron.asc"
    curl --fail --silent --show-error --location --output "${DESTDIR:-}$key" "$NEURON_APT_KEY_URL"
    codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
    echo "deb [signed-by=$key] $NEURON_APT_URL $codename main" >"${DESTDIR:-}/etc/apt/sources.list.d/neuron.list"
    apt-get update
}

driver() {
    apt-get install --yes "linux-headers-$(uname -r)" "aws-neuronx-dkms=$NEURON_DRIVER.*"
}

runtime() {
    apt-get install --yes --no-install-recommends "aws-neuronx-runtime-lib=$NEURON_RUNTIME.*" \
        "aws-neuronx-collectives=$NEURON_RUNTIME.*" "aws-neuronx-tools=$NEURON_TOOLS.*"
}

python() {
    nki="nki==$NEURON_NKI.*"
    [ "$NEURON_NKI" != none ] || nki="" # neuronx-cc up to 2.22 brings neuronxcc.nki with it
    python3 -m venv "$NKW_HOME/venv"
    # The exact first two numbers keep out the placeholders that the public index has under these names.
    "$NKW_HOME/venv/bin/python" -m pip install --no-cache-dir --extra-index-url "$NEURON_PIP_URL" \
        "neuronx-cc==$NEURON_COMPILER.*" ${nki:+"$nki"}
    package="$NKW_PACKAGE"
    case "$package" in
    s3://*.whl) # read with the role of the instance's profile
        command -v aws >/dev/null || fail "NKW_PACKAGE is in a bucket, and the command aws is missing: give a signed address"
        package="$NKW_HOME/$(basename "$NKW_PACKAGE")"
        aws s3 cp --only-show-errors "$NKW_PACKAGE" "$package"
        ;;
    esac
    "$NKW_HOME/venv/bin/python" -m pip install --no-cache-dir "$package"
}

nrtpy() { # of the release of the runtime; it cannot share an environment with nki
    python3 -m venv "$NKW_HOME/nrtpy"
    "$NKW_HOME/nrtpy/bin/python" -m pip install --no-cache-dir --extra-index-url "$NEURON_PIP_URL" \
        "nrtpy==$NEURON_RUNTIME.*" numpy
}

[ "$#" -gt 0 ] || fail "a part is needed: driver, runtime, python, nrtpy"
for part in "$@"; do
    case "$part" in
    driver) need NEURON_APT_URL NEURON_APT_KEY_URL NEURON_DRIVER ;;
    runtime) need NEURON_APT_URL NEURON_APT_KEY_URL NEURON_RUNTIME NEURON_TOOLS ;;
    python) need NEURON_PIP_URL NEURON_COMPILER NEURON_NKI NKW_PACKAGE NKW_HOME ;;
    nrtpy) need NEURON_PIP_URL NEURON_RUNTIME NKW_HOME ;;
    *) fail "$part is no part; the parts are driver, runtime, python, nrtpy" ;;
    esac
done
case " $* " in
*" driver "* | *" runtime "*) repository ;;
esac
for part in "$@"; do
    "$part"
done
