//! Attempts to get out of a machine of its own, by its root and by a hypervisor that was taken
//! over. Each must fail, and affect no other sandbox.
//!
//! Machines are dear where they are emulated, so there are two for all attempts: one that tries, and a neighbour.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::net::{IpAddr, TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use sandkeep_core::engine::{Engine, Exec};
use sandkeep_core::model::MachineKey;
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house::{House, machine, name, ok, project, until};
use tokio::time::timeout;

/// Somebody on the host, whom no machine may reach.
struct Bystander {
    tcp: TcpListener,
    udp: UdpSocket,
    hidden: UnixListener,
    /// The name of the last, which is in no filesystem.
    abstract_name: String,
    /// An address of the host's that is not its loopback, if it has one.
    address: Option<IpAddr>,
    /// Whom the operator lets everybody reach.
    open: TcpListener,
}

impl Bystander {
    fn new() -> Self {
        let abstract_name = format!("keep-bystander-{}", std::process::id());
        let at = SocketAddr::from_abstract_name(&abstract_name).unwrap();
        let outward = UdpSocket::bind("0.0.0.0:0").unwrap();
        // Nothing is sent: the kernel is asked which address it would send from.
        let address = outward.connect("192.0.2.1:9").and_then(|()| outward.local_addr());
        let it = Self {
            tcp: TcpListener::bind("0.0.0.0:0").unwrap(),
            udp: UdpSocket::bind("0.0.0.0:0").unwrap(),
            hidden: UnixListener::bind_addr(&at).unwrap(),
            abstract_name,
            address: address.ok().map(|address| address.ip()),
            open: TcpListener::bind("127.0.0.1:0").unwrap(),
        };
        it.tcp.set_nonblocking(true).unwrap();
        it.udp.set_nonblocking(true).unwrap();
        it.hidden.set_nonblocking(true).unwrap();
        it.open.set_nonblocking(true).unwrap();
        it
    }

    fn ports(&self) -> (u16, u16) {
        (self.tcp.local_addr().unwrap().port(), self.udp.local_addr().unwrap().port())
    }

    fn undisturbed(&self, who: &str) {
        let mut heard = [0; 2048];
        assert!(self.tcp.accept().is_err(), "{who} reached a server");
        assert!(self.udp.recv_from(&mut heard).is_err(), "{who} sent a datagram: {heard:?}");
        assert!(self.hidden.accept().is_err(), "{who} reached a socket without a file");
    }
}

/// Runs a perl script as root that must come to its end, and returns what it printed.
async fn perl(engine: &Engine, sandbox: &str, script: &str, arguments: &[&str]) -> String {
    let arguments = arguments.join(" ");
    ok(engine, sandbox, &format!("perl - {arguments} <<'END_OF_SCRIPT'\n{script}\nEND_OF_SCRIPT"))
        .await
}

/// The process of a machine.
async fn hypervisor(engine: &Engine, house: &House, sandbox: &str) -> (u32, u32, PathBuf) {
    let found = engine.get(&project(), &name(sandbox)).await.unwrap().sandbox;
    let run_dir = house.path().join("machines").join(MachineKey::from(&found.id).as_str());
    let record = fs::read(run_dir.join("machine.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let pid = u32::try_from(record["pid"].as_u64().unwrap()).unwrap();
    (pid, found.uids().unwrap().base, run_dir)
}

/// What several machines have in common on the host: packed layers by their bytes, blank disks by what changes with every write.
fn common(house: &House) -> BTreeMap<PathBuf, (Vec<u8>, i64, u64)> {
    let places = ["roots", "blank"].map(|place| house.data().join("microvm").join(place));
    let files = places.iter().flat_map(|place| fs::read_dir(place).unwrap());
    let files = files.map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    files
        .map(|path| {
            let about = fs::metadata(&path).unwrap();
            let packed = path.extension().is_some_and(|extension| extension == "erofs");
            // It seems to be as large as its device; what is in it is at its beginning.
            let length = if packed { about.blocks() * 512 } else { 0 };
            let mut bytes = Vec::new();
            fs::File::open(&path).unwrap().take(length).read_to_end(&mut bytes).unwrap();
            (path, (bytes, about.mtime_nsec() + about.mtime(), about.blocks()))
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn there_is_no_way_out_of_a_machine() {
    let test = "there_is_no_way_out_of_a_machine";
    let mut house = match House::new().and_then(House::with_machines) {
        Ok(house) => house,
        Err(why) => return skipped(test, &why),
    };
    let bystander = Bystander::new();
    let open = bystander.open.local_addr().unwrap();
    house.settings.network.except.push(open.to_string().parse().unwrap());
    let engine = house.open().await;
    for sandbox in ["m", "other"] {
        engine.create(&project(), machine(sandbox), None).await.unwrap();
    }
    let before = common(&house);
    assert!(before.len() >= 2, "{:?}", before.keys());

    beyond_its_disks(&engine).await;
    what_the_firmware_tells(&engine, &house).await;
    over_the_network(&engine, &bystander).await;
    in_place_of_the_hypervisor(&engine, &house, &bystander).await;
    over_the_link(&engine).await;

    assert!(common(&house) == before, "what machines share was written to");
    assert_eq!(ok(&engine, "other", "cat /root/file; hostname").await, "mine\nother\n");
    for sandbox in ["m", "other"] {
        let (project, name) = (project(), name(sandbox));
        let gone = engine.delete(&project, &name, Default::default(), None);
        timeout(Duration::from_secs(120), gone).await.expect("it goes").unwrap();
    }
    assert!(house.machines_alive().await.is_empty());
    bystander.undisturbed("somebody");
}

/// Every device has its size and no byte more; what is read-only stays so whatever the guest's
/// kernel is asked.
async fn beyond_its_disks(engine: &Engine) {
    const SCRIPT: &str = r#"
opendir my $all, '/sys/block' or die $!;
for my $device (grep /^vd/, readdir $all) {
    my $dir = "/sys/block/$device";
    my $read = sub { open my $f, '<', "$dir/$_[0]" or return ''; my $t = <$f> // ''; chomp $t; $t };
    my ($serial, $size) = ($read->('serial'), 512 * $read->('size'));
    my $past = 'none';
    if (open my $f, '<', "/dev/$device") { sysseek($f, $size, 0); $past = sysread($f, my $b, 4096) // 'error' }
    my $wrote = 'no';
    if (open my $f, '<', "/dev/$device") { my $no = pack('i', 0); ioctl($f, 0x125d, $no) }   # BLKROSET: not read-only any more
    if (open my $f, '+<', "/dev/$device") {
        # A lower one from its start; a disk beyond its end, where there may be somebody else's.
        sysseek($f, $serial =~ /lower/ ? 0 : $size, 0);
        $wrote = 'yes' if syswrite($f, 'escaped!' x 512) && syscall(74, fileno $f) == 0;   # fsync
    }
    print "$serial $size $past $wrote\n";
}
"#;
    let told = perl(engine, "m", SCRIPT, &[]).await;
    let devices: BTreeMap<&str, Vec<&str>> = told
        .lines()
        .map(|line| {
            let mut words = line.split(' ');
            (words.next().unwrap(), words.collect())
        })
        .collect();
    assert_eq!(devices.len(), 1 + 8 + 2 * 4, "all slots and nothing else: {told}");
    for (serial, about) in devices {
        let size = if serial == "disk" { 1_u64 << 30 } else { 256 << 30 };
        assert_eq!(about, [&*size.to_string(), "0", "no"], "{serial}");
    }
}

/// A program that selects an item of the firmware's interface and prints what is in it, for want of a tool: `iopl`, `outw`, `insb`.
const FIRMWARE: &str = "b8ac000000bf030000000f05\
    66ba1005 66b8KKKK 66ef 66ba1105 4881ec00200000 4889e7 b900200000 fc f36c\
    b801000000 bf01000000 4889e6 ba00200000 0f05 b83c000000 31ff 0f05";

/// Makes an ELF file of one segment with nothing in it but that program for each item, and runs it.
const ITEMS: &str = r#"
my $program = shift;
for my $item (0 .. 0x50, 0x8000 .. 0x8003) {
    my $code = $program; my $key = sprintf '%02x%02x', $item & 255, $item >> 8; $code =~ s/KKKK/$key/;
    $code = pack 'H*', $code;
    my $elf = "\x7fELF\x02\x01\x01" . "\0" x 9 . pack('SSLQQQLSSSSSS', 2, 62, 1, 0x400078, 64, 0, 0, 64, 56, 1, 0, 0, 0)
        . pack('LLQQQQQQ', 1, 5, 0, 0x400000, 0x400000, 120 + length $code, 120 + length $code, 4096) . $code;
    open my $f, '>', '/run/item' or die $!; print $f $elf; close $f; chmod 0755, '/run/item';
    open my $p, '-|', '/run/item' or die $!; local $/; print "item $item: ", <$p>, "\n";
}
"#;

async fn what_the_firmware_tells(engine: &Engine, house: &House) {
    let code: String = FIRMWARE.split_whitespace().collect();
    let told = perl(engine, "m", ITEMS, &[&code]).await;
    assert!(told.contains("item 0: QEMU"), "the interface was reached: {:?}", &told[..200]);
    let names: Vec<&str> = ["etc/", "opt/", "bootorder", "genroms/"].to_vec();
    assert!(names.iter().any(|name| told.contains(name)), "and its directory");
    assert!(!told.contains("opt/"), "nothing was put there for guests");
    let host = house.path().to_string_lossy().into_owned();
    assert!(!told.contains(&host), "no path of the host's is told");
    // Nor elsewhere, where a guest finds what it is made of.
    let all = ok(
        engine,
        "m",
        "cat /proc/cmdline /proc/mounts /proc/self/mountinfo /proc/net/unix; \
         find /sys/firmware /sys/class/dmi /sys/class/net -type f -exec head -c 4096 {} + 2>/dev/null; ls /proc/1/root/ /proc/1/cwd/",
    )
    .await;
    assert!(!all.contains(&host) && !all.contains("sandkeep-test"), "{all}");
}

/// Every way to another sandbox that a root with a raw socket has.
const FRAMES: &str = r#"
sub inet_aton { pack 'C4', split /\./, $_[0] }
sub at { my ($port, $host) = @_; pack 'S n a4 x8', 2, $port, inet_aton($host) }
my ($tcp, $udp, $open, $address) = @ARGV;
my @hosts = ($address, qw(127.0.0.1 100.96.0.1 100.97.0.1 169.254.169.254 0.0.0.0 255.255.255.255 100.96.0.3));
sub dial {
    my ($host, $port) = @_;
    socket(my $s, 2, 1, 0); my $r = 0;
    local $SIG{ALRM} = sub { die }; eval { alarm 3; $r = connect($s, at($port, $host)); alarm 0 };
    return $r ? 1 : 0;
}
for my $host (@hosts) { print "reached $host\n" if dial($host, $tcp) }
for my $host (@hosts) {
    socket(my $s, 2, 2, 0); setsockopt($s, 1, 6, pack('i', 1));
    send($s, 'datagram', 0, at($udp, $host));
}
# Frames of its own making, from others' addresses to others'.
socket(my $raw, 17, 3, 0x0300) or die "raw: $!";
my ($index) = do { open my $f, '<', '/sys/class/net/eth0/ifindex'; <$f> };
my $to = pack('S n i S C C a8', 17, 0x0800, $index, 1, 0, 6, "\xff" x 6);
sub sum { my $t = 0; $t += $_ for unpack 'n*', $_[0] . "\0" x (length($_[0]) % 2); $t = ($t & 0xffff) + ($t >> 16) while $t >> 16; ~$t & 0xffff }
my $sent = 0;
for my $mac ("\x02\0\0\0\0\x01", "\xff" x 6, "\0" x 6, pack('H*', '525400123456')) {
    my $arp = pack('n n C C n', 1, 0x0800, 6, 4, 2) . $mac . inet_aton('100.96.0.1') . "\xff" x 6 . inet_aton('100.96.0.2');
    $sent++ if send($raw, "\xff" x 6 . $mac . pack('n', 0x0806) . $arp . "\0" x 18, 0, $to);
    for my $from ($address, qw(100.96.0.2 100.96.0.1 127.0.0.1)) {
        for my $host (@hosts, '100.96.0.2') {
            my $body = pack('n n n n', 4242, $udp, 8 + 5, 0) . 'frame';
            my $ip = pack('C C n n n C C n', 0x45, 0, 20 + length $body, 1, 0, 64, 17, 0) . inet_aton($from) . inet_aton($host);
            substr($ip, 10, 2) = pack 'n', sum($ip);
            $sent++ if send($raw, "\x02\0\0\0\0\x01" . $mac . pack('n', 0x0800) . $ip . $body, 0, $to);
            # And the beginning of a connection.
            my $syn = pack('n n N N n n n n', 4242, $tcp, 1, 0, 0x5002, 65535, 0, 0);
            my $pseudo = inet_aton($from) . inet_aton($host) . pack('C C n', 0, 6, length $syn);
            substr($syn, 16, 2) = pack 'n', sum($pseudo . $syn);
            substr($ip, 2, 2) = pack 'n', 20 + length $syn; substr($ip, 9, 1) = "\x06"; substr($ip, 10, 2) = "\0\0";
            substr($ip, 10, 2) = pack 'n', sum($ip);
            $sent++ if send($raw, "\x02\0\0\0\0\x01" . $mac . pack('n', 0x0800) . $ip . $syn, 0, $to);
        }
    }
}
for my $length (14, 15, 33, 60, 1500, 60000) { send($raw, "\x45" x $length, 0, $to) }
sleep 1;
print "sent ", ($sent > 200 ? 'all' : $sent), "\n";
print "open ", dial('100.97.0.1', $open), "\n";
"#;

async fn over_the_network(engine: &Engine, bystander: &Bystander) {
    let (tcp, udp) = bystander.ports();
    let open = bystander.open.local_addr().unwrap().port();
    // The neighbour listens, and keeps what it receives.
    let listen = format!(
        "echo mine > /root/file; perl -e 'socket(S, 2, 2, 0); bind(S, pack(\"S n a4 x8\", 2, {udp}, \"\\0\" x 4)) or die; \
         open F, \">>\", \"/root/heard\"; print F \"\"; close F; while (1) {{ recv(S, $b, 2000, 0); open F, \">>\", \"/root/heard\"; print F $b; close F }}' \
         >/dev/null 2>&1 & sleep 0.5; test -e /root/heard"
    );
    ok(engine, "other", &listen).await;
    let address = bystander.address.map_or_else(|| "100.96.0.1".to_owned(), |ip| ip.to_string());
    let ports = [tcp, udp, open].map(|port| port.to_string());
    let told = perl(engine, "m", FRAMES, &[&ports[0], &ports[1], &ports[2], &address]).await;
    assert_eq!(told, "sent all\nopen 1\n", "nobody is reached but who is open to all");
    assert!(bystander.open.accept().is_ok(), "and that one is");
    bystander.undisturbed("a guest");
    assert_eq!(ok(engine, "other", "cat /root/heard").await, "", "the neighbour heard nothing");
    // A file of the host's has no name in there, and a socket without a file is of another kernel.
    let hidden = format!(
        "socket(my $s, 1, 1, 0); print connect($s, pack('S a*', 1, \"\\0{}\")) ? 'reached' : 'no';",
        bystander.abstract_name
    );
    assert_eq!(perl(engine, "m", &hidden, &[]).await, "no");
}

/// Says what it can do that it should not be able to.
const TRIES: &str = r#"
my ($tcp, $udp, $hidden, $house, $data, $run, $other, @processes) = @ARGV;
my @can;
for my $path ('/etc/passwd', '/etc/shadow', '/root', '/home', '/var', '/run', '/tmp', '/proc', '/sys', '/boot', '/opt', '/srv', $house,
        $run, $data, '/dev/mem', '/dev/kmsg', '/dev/fuse', '/dev/vhost-net', '/dev/net/tun', '/dev/shm') {
    push @can, "see $path" if -e $path;
}
for my $dir ('/', '/usr', '/usr/bin', '/usr/lib', '/etc', '/dev', '/net', '/lib', '/tmp') {
    push @can, "write to $dir" if -d $dir && open my $f, '>', "$dir/escaped";
}
for my $file ('/usr/bin/perl', '/kernel', '/initramfs', '/ram.so', '/net/host.sock') {
    push @can, "change $file" if open(my $f, '>>', $file) || chmod(0777, $file) || unlink($file);
}
for my $name ('/dev/null', '/dev/zero', '/dev/urandom') { push @can, "not open $name" if !open my $f, '<', $name }
push @can, "signal $_" for grep { kill 0, $_ } @processes;
push @can, 'be root' if syscall(105, 0) == 0 || syscall(117, 0, 0, 0) == 0 || syscall(106, 0) == 0;
push @can, 'be the neighbour' if syscall(117, $other, $other, $other) == 0;
my @mount = ('none', '/dev', 'tmpfs', 0, 0);
push @can, 'mount' if syscall(165, @mount) == 0;
my @device = ('/net/d', 0x2180, 0x103);
push @can, 'make a device' if syscall(133, @device) == 0;
push @can, 'leave its root' if chroot '/usr';
push @can, 'read the kernel\'s messages' if syscall(103, 3, my $b = "\0" x 4096, 4096) > 0;
push @can, 'have a raw socket' if socket(my $raw, 17, 3, 0x0300);
my $connect = sub { my ($kind, $address) = @_; my $s; socket($s, unpack('S', $address), $kind, 0) && connect($s, $address) };
push @can, "reach 127.0.0.1" if $connect->(1, pack('S n C4 x8', 2, $tcp, 127, 0, 0, 1));
my $u;
push @can, "send to 127.0.0.1" if socket($u, 2, 2, 0) && send($u, 'x', 0, pack('S n C4 x8', 2, $udp, 127, 0, 0, 1));
push @can, 'reach a socket without a file' if $connect->(1, pack('S a*', 1, "\0$hidden"));
print "$_\n" for @can, 'that is all';
"#;

/// What code has that runs as the hypervisor: its namespaces, its root, its user. All but its filter of system calls, which would
/// let it do less.
async fn in_place_of_the_hypervisor(engine: &Engine, house: &House, bystander: &Bystander) {
    let (pid, uid, run_dir) = hypervisor(engine, house, "m").await;
    let (neighbour, other_uid, _) = hypervisor(engine, house, "other").await;
    assert_ne!(uid, other_uid, "each has a user of its own");
    descriptors(house, pid, &run_dir);
    confined(pid);

    let (tcp, udp) = bystander.ports();
    let paths = [house.path(), &house.data(), &run_dir].map(|path| path.display().to_string());
    let numbers = [other_uid, pid, neighbour, std::process::id()].map(|number| number.to_string());
    let ports = [tcp, udp].map(|port| port.to_string());
    let id = uid.to_string();
    let ran = Command::new("nsenter")
        .args(["--target", &pid.to_string(), "--mount", "--uts", "--ipc", "--net", "--pid"])
        .args(["--root", "--wd", "setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"])
        .args(["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "perl", "-e", TRIES])
        .args(ports)
        .arg(&bystander.abstract_name)
        .args(paths)
        .args(numbers)
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&ran.stdout).into_owned();
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert_eq!(told, "that is all\n", "{said}");
    bystander.undisturbed("a hypervisor");
}

/// It may write to its own disk and to what is in its runtime directory, and to nothing else that is a file.
fn descriptors(house: &House, pid: u32, run_dir: &Path) {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let (mut written, mut read, mut sockets) = (Vec::new(), Vec::new(), 0);
    for entry in fs::read_dir(proc.join("fd")).unwrap() {
        let entry = entry.unwrap();
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let number = entry.file_name();
        let info = fs::read_to_string(proc.join("fdinfo").join(number)).unwrap_or_default();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok()).unwrap_or(0);
        match target.is_absolute() {
            true if flags & 3 == 0 => read.push(target),
            true => written.push(target),
            false => sockets += u32::from(target.to_string_lossy().starts_with("socket:")),
        }
    }
    let layers = house.data().join("layers");
    let own = |path: &&PathBuf| {
        let disk =
            path.starts_with(&layers) && path.parent().is_some_and(|at| at.ends_with("disk"));
        disk || path.starts_with(run_dir)
            || **path == Path::new("/ram")
            || **path == Path::new("/dev/null")
    };
    let foreign: Vec<_> = written.iter().filter(|path| !own(path)).collect();
    assert!(!written.is_empty() && foreign.is_empty(), "it can write to {foreign:?}");
    let disks: std::collections::BTreeSet<_> =
        written.iter().filter(|path| path.starts_with(&layers)).collect();
    assert_eq!(disks.len(), 1, "its own disk: {disks:?}");
    let given = ["memory", "microvm/roots", "microvm/blank"].map(|place| house.data().join(place));
    let known = |path: &&PathBuf| given.iter().any(|place| path.starts_with(place)) || own(path);
    let foreign: Vec<_> = read.iter().filter(|path| !known(path)).collect();
    assert!(foreign.is_empty(), "it can read {foreign:?}");
    // The control socket and its client, the link and its client, the card.
    assert!((3..=5).contains(&sockets), "{sockets} sockets");
}

/// It is in a control group that has bounds, and may leave nothing behind when it dies.
fn confined(pid: u32) {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let groups = fs::read_to_string(proc.join("cgroup")).unwrap();
    let bounds = |controller: &str, names: [&str; 2]| {
        let line = groups.lines().find(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            parts.next().is_some_and(|of| of.is_empty() || of.split(',').any(|of| of == controller))
        });
        let path = line.unwrap().rsplit(':').next().unwrap().trim_start_matches('/').to_owned();
        let places = [Path::new("/sys/fs/cgroup").join(controller), "/sys/fs/cgroup".into()];
        let files = places.iter().flat_map(|place| names.map(|name| place.join(&path).join(name)));
        let found = files.filter_map(|file| fs::read_to_string(file).ok()).next();
        found.unwrap_or_else(|| panic!("no bound of {controller} in {groups}")).trim().to_owned()
    };
    let memory: u64 = bounds("memory", ["memory.max", "memory.limit_in_bytes"]).parse().unwrap();
    assert!((256 << 20..1 << 30).contains(&memory), "{memory} bytes");
    let pids: u64 = bounds("pids", ["pids.max", "pids.max"]).parse().unwrap();
    assert!(pids < 1000, "{pids} threads");
    let limits = fs::read_to_string(proc.join("limits")).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert!(core.split_whitespace().skip(4).take(2).all(|limit| limit == "1"), "{core}");
    let mounts = fs::read_to_string(proc.join("mountinfo")).unwrap();
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let options: Vec<&str> = fields[5].split(',').collect();
        let shut =
            options.contains(&"nosuid") && (options.contains(&"nodev") || fields[4] == "/dev");
        let closed = options.contains(&"ro") || ["/", "/net"].contains(&fields[4]);
        assert!(shut && closed, "{line}");
    }
}

/// The agent's own port, in the hands of the guest's root: what it sends there is taken as this
/// machine's alone, and when it is done the machine is reached as before.
async fn over_the_link(engine: &Engine) {
    const SCRIPT: &str = r#"
my $port;
opendir my $all, '/proc/1/fd' or die $!;
for my $fd (grep /^\d/, readdir $all) { $port = $fd if readlink("/proc/1/fd/$fd") =~ /vport/ }
defined $port or die 'no port';
my $taken = open(my $again, '+<', '/dev/' . (readlink("/proc/1/fd/$port") =~ m{([^/]+)$})[0]) ? 1 : 0;
my $agent = syscall(434, 1, 0); my $stolen = syscall(438, $agent, $port + 0, 0);
$stolen >= 0 or die "not stolen: $!";
open my $link, '>&=', $stolen or die $!; binmode $link;
my $json = '{"ok":{"version":1,"pid":1,"command":"cmd-0","commands":[{"command":"cmd-0","state":"running"}]}}';
my $frames = '';
for my $stream (0 .. 300) { for my $kind (0 .. 9) { $frames .= pack('L L C x3', length $json, $stream, $kind) . $json } }
my @parts = ($frames, "\xa5\x01" . "\0" x 16, "\xa5\xff", "\xff" x 5000, pack('L L C x3', 0x7fffffff, 1, 3), "\xa5" x 100, $frames);
print "said\n"; $| = 1; close STDOUT;
local $SIG{ALRM} = sub { exit 0 }; alarm 5;
for my $part (@parts) { syswrite($link, $part); select undef, undef, undef, 0.1 }
"#;
    let line = format!("perl <<'END_OF_SCRIPT'\n{SCRIPT}\nEND_OF_SCRIPT");
    // Its answer may be lost among what it says.
    let argv = ["sh", "-c", &line].map(str::to_owned).to_vec();
    let exec = Exec { argv, detach: true, ..Default::default() };
    engine.exec(&project(), &name("m"), exec).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(ok(engine, "other", "cat /root/file").await, "mine\n", "the neighbour is as it was");
    let reached = until("a machine that is reached again", async || {
        let argv = ["hostname"].map(str::to_owned).to_vec();
        let exec = Exec { argv, ..Exec::default() };
        let mut started = engine.exec(&project(), &name("m"), exec).await.ok()?;
        started.events.next().await
    });
    assert!(timeout(Duration::from_secs(120), reached).await.is_ok());
    assert_eq!(ok(engine, "m", "hostname").await, "m\n");
}
