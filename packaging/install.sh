#!/bin/sh
# Installs, upgrades or removes Sandkeep, on any Linux distribution with glibc. Run it as root, in the directory it came in.
#
#   ./install.sh [--prefix DIR] [--no-service]   install or upgrade; sandboxes keep running [default: /usr/local]
#   ./install.sh --uninstall [--prefix DIR]      stop all sandboxes, remove the program; settings and data stay
#   ./install.sh --uninstall --purge             remove settings and data, too; asks before, unless --yes is given
set -eu

prefix=/usr/local action=install service=yes purge='' yes=''
config=/etc/sandkeep/config.toml data=/var/lib/sandkeep unit=/etc/systemd/system/sandkeep.service

say() { printf '%s\n' "$*"; }
fail() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

while [ $# -gt 0 ]; do
    case "$1" in
    --prefix) [ $# -gt 1 ] || fail "--prefix needs a directory"; prefix=$2; shift ;;
    --no-service) service='' ;;
    --uninstall) action=uninstall ;;
    --purge) purge=yes ;;
    --yes) yes=yes ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) fail "unknown argument \`$1\`; --help lists them" ;;
    esac
    shift
done
case "$prefix" in /*) ;; *) fail "--prefix must be an absolute path, not \`$prefix\`" ;; esac
[ -z "$purge" ] || [ "$action" = uninstall ] || fail "--purge goes with --uninstall"
[ "$(id -u)" = 0 ] || fail "run this as root: sudo $0"
cd "$(dirname "$0")"
[ -d /run/systemd/system ] || service=''
[ ! -e /var/lib/dpkg/info/sandkeep.list ] || [ ! -e /usr/bin/keep ] ||
    fail "the Debian package of Sandkeep is installed; use dpkg to upgrade it or apt-get to remove it"

copy() { # copy MODE FROM TO: a program that runs is replaced, not written to
    mkdir -p "$(dirname "$3")"
    cp "$2" "$3.new"
    chmod "$1" "$3.new"
    mv -f "$3.new" "$3"
}

# What is installed below the prefix.
files() {
    find bin share -type f
}

install_all() {
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "this is the program for Linux on x86-64"
    bin/keep version >/dev/null 2>&1 || fail "the program does not run here: $(bin/keep version 2>&1 | head -1)"
    upgrade=''
    [ ! -e "$prefix/bin/keep" ] || upgrade=yes
    files | while read -r file; do
        # Where shells look below a prefix of one's own.
        to=$(printf '%s' "$file" | sed 's,^share/zsh/vendor-completions,share/zsh/site-functions,')
        case "$file" in bin/*) mode=755 ;; *) mode=644 ;; esac
        copy $mode "$file" "$prefix/$to"
    done
    mkdir -p /etc/sandkeep
    if [ ! -e $config ]; then
        copy 644 config.toml $config
    elif ! cmp -s config.toml $config; then
        copy 644 config.toml $config.new
        say "Your settings in $config are kept; those of this version are in $config.new"
    fi
    [ -d $data ] || mkdir -m 700 -p $data
    if [ -z "$service" ]; then
        say "Sandkeep is installed. Start the server as root: $prefix/bin/keep serve --config $config"
        say "Then try it: $prefix/bin/keep run --rm -- uname -a"
        say "Settings: $config. Data: $data. What this host can do: $prefix/bin/keep doctor"
        return
    fi
    sed "s,^ExecStart=/usr/bin/keep,ExecStart=$prefix/bin/keep," sandkeep.service >.unit
    copy 644 .unit $unit
    rm -f .unit
    systemctl daemon-reload
    systemctl --quiet enable sandkeep.service
    # Sandboxes keep running; the new server finds them.
    systemctl restart sandkeep.service ||
        fail "the server does not start; \`systemctl status sandkeep\` says why, \`$prefix/bin/keep doctor\` what this host lacks"
    if [ -n "$upgrade" ]; then
        say "Sandkeep was upgraded; its server was restarted, and sandboxes kept running."
        return
    fi
    say "Sandkeep runs. Try it as root: $prefix/bin/keep run --rm -- uname -a"
    say "Settings: $config, then \`systemctl restart sandkeep\`. Data: $data"
    say "Other users: \`keep key create NAME\` makes a key; they set SANDKEEP_URL=http://127.0.0.1:7777 and SANDKEEP_KEY"
}

uninstall_all() {
    [ -x "$prefix/bin/keep" ] || fail "there is no $prefix/bin/keep; name where it was installed with --prefix"
    if [ -n "$purge" ] && [ -z "$yes" ]; then
        printf 'Delete all sandboxes, snapshots, images and secrets in %s? They cannot be restored. [y/N] ' $data
        read -r answer || answer=''
        case "$answer" in y | Y | yes) ;; *) fail "nothing was removed" ;; esac
    fi
    code=0
    said=$(env -i PATH="$PATH" "$prefix/bin/keep" stop --all --all-projects 2>&1) || code=$?
    # 3: no server runs.
    if [ $code != 0 ] && [ $code != 3 ]; then
        say "$said" >&2
        fail "the sandboxes above could not be stopped: stop them (keep stop NAME; --discard gives up their changes) or delete them"
    fi
    if [ $code = 3 ]; then
        # They outlive their server.
        for group in /sys/fs/cgroup/sandkeep-*/sbx* /sys/fs/cgroup/pids/sandkeep-*/sbx*; do
            [ ! -d "$group" ] || fail "sandboxes run, and no server; start it (systemctl start sandkeep), then try again"
        done
    fi
    if [ -e $unit ]; then
        [ -z "$service" ] || systemctl --quiet disable --now sandkeep.service || true
        rm -f $unit
        [ -z "$service" ] || systemctl daemon-reload
    elif [ $code = 0 ]; then
        fail "all sandboxes are stopped, but a server still runs; end it, then try again"
    fi
    files | while read -r file; do
        rm -f "$prefix/$(printf '%s' "$file" | sed 's,^share/zsh/vendor-completions,share/zsh/site-functions,')"
    done
    rmdir "$prefix/share/doc/sandkeep/docs"/* "$prefix/share/doc/sandkeep/docs" "$prefix/share/doc/sandkeep" 2>/dev/null || true
    if [ -n "$purge" ]; then
        ! grep -q " $data/" /proc/self/mounts || fail "something is mounted below $data; unmount it, then delete $data"
        rm -rf --one-file-system $data /etc/sandkeep
        say "Sandkeep, its settings and its data are removed."
    else
        say "Sandkeep is removed. Settings are kept in /etc/sandkeep, sandboxes and snapshots in $data"
    fi
}

${action}_all
