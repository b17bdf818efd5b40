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
    command -v gpg >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends gpg; }
    key="/usr/share/keyrings/neuron.asc"
    curl --fail --silent --show-error --location --output "${DESTDIR:-}$key.new" "$NEURON_APT_KEY_URL"
    # apt trusts every key of the file, so the fingerprints of all primary keys are compared.
    keys=$(gpg --batch --show-keys --with-colons "${DESTDIR:-}$key.new" |
        awk -F: '$1 == "pub" { primary = 1 } $1 == "fpr" && primary { print $10; primary = 0 }')
    wanted=$(echo "$NEURON_APT_KEY_FINGERPRINT" | tr -d ' ')
    if [ "$keys" != "$wanted" ]; then
        rm -f "${DESTDIR:-}$key.new"
        fail "the key at $NEURON_APT_KEY_URL has the fingerprint ${keys:-of no key}, not $wanted; nothing was installed"
    fi
    mv "${DESTDIR:-}$key.new" "${DESTDIR:-}$key"
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

# Prints what the wheels of a folder require, one requirement in a line, as pip takes them.
REQUIREMENTS='
import email, pathlib, sys, zipfile
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        print(*email.message_from_bytes(file.read(name)).get_all("Requires-Dist") or [], sep="\n")
'

# Downloads packages from the vendor's repository alone: no other index, setting or variable of pip counts.
from_vendor() { # VENV REQUIREMENT...
    environment="$1"
    shift
    PIP_CONFIG_FILE=/dev/null "$environment/bin/python" -m pip --isolated download --no-cache-dir --no-deps \
        --only-binary :all: --index-url "$NEURON_PIP_URL" --dest "$environment/wheels" "$@"
}

# Installs packages of the vendor. Their requirements come from the vendor's repository if it has them, else from the
# index that pip is set up for. With --extra-index-url pip would take the highest version of both, whoever published it.
install_vendor() { # VENV REQUIREMENT...
    rm -rf "$1/wheels"
    from_vendor "$@"
    requirements=""
    while :; do
        found=$("$1/bin/python" -c "$REQUIREMENTS" "$1/wheels")
        [ "$found" != "$requirements" ] || break
        requirements="$found"
        echo "$requirements" | while IFS= read -r requirement; do
            [ -z "$requirement" ] || from_vendor "$1" --quiet "$requirement" 2>/dev/null || true
        done
    done
    "$1/bin/python" -m pip install --no-cache-dir "$1/wheels"/*.whl
    rm -rf "$1/wheels"
}

python() {
    nki="nki==$NEURON_NKI.*"
    [ "$NEURON_NKI" != none ] || nki="" # neuronx-cc up to 2.22 brings neuronxcc.nki with it
    python3 -m venv "$NKW_HOME/venv"
    install_vendor "$NKW_HOME/venv" "neuronx-cc==$NEURON_COMPILER.*" ${nki:+"$nki"}
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
    install_vendor "$NKW_HOME/nrtpy" "nrtpy==$NEURON_RUNTIME.*"
    "$NKW_HOME/nrtpy/bin/python" -m pip install --no-cache-dir numpy
}

[ "$#" -gt 0 ] || fail "a part is needed: driver, runtime, python, nrtpy"
for part in "$@"; do
    case "$part" in
    driver) need NEURON_APT_URL NEURON_APT_KEY_URL NEURON_APT_KEY_FINGERPRINT NEURON_DRIVER ;;
    runtime) need NEURON_APT_URL NEURON_APT_KEY_URL NEURON_APT_KEY_FINGERPRINT NEURON_RUNTIME NEURON_TOOLS ;;
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
