use std::fs;
use std::net::IpAddr;
use std::path::Path;

use super::{KeySource, MicrovmSettings, Resolved, SecretsFile, resolve, secrets_key};
use crate::args::{Global, ServeArgs};
use crate::failure::Failure;

fn with(toml: &str, args: ServeArgs, data: Option<&str>) -> Result<Resolved, Failure> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keep.toml");
    fs::write(&path, toml).unwrap();
    let global = Global {
        json: false,
        url: None,
        key: None,
        ca: None,
        project: None,
        data: data.map(Into::into),
    };
    resolve(&global, ServeArgs { config: Some(path), ..args })
}

#[test]
fn the_command_line_wins_over_the_file() {
    let toml = "data = '/a'\nlisten = '127.0.0.1:1'\nlog = 'debug'\nhost_image = false";
    let file = with(toml, ServeArgs::default(), None).unwrap();
    assert_eq!(file.data, Path::new("/a"));
    assert_eq!(file.listen, ["127.0.0.1:1".parse().unwrap()]);
    assert_eq!(file.unix_socket.as_deref(), Some(Path::new("/a/keep.sock")));
    assert_eq!((file.log.as_str(), file.host_image), ("debug", false));
    let args = ServeArgs {
        listen: Some("127.0.0.1:2".to_owned()),
        unix_socket: Some("off".to_owned()),
        ..ServeArgs::default()
    };
    let line = with(toml, args, Some("/b")).unwrap();
    assert_eq!(line.data, Path::new("/b"));
    assert_eq!(line.listen, ["127.0.0.1:2".parse().unwrap()]);
    assert_eq!(line.unix_socket, None);
}

#[test]
fn vercels_clients_are_told_what_their_words_stand_for() {
    let toml = "[vercel]\ndefault_image = 'base'\nmax_timeout = '2h'\n\
        [vercel.runtimes]\nnode24 = 'node:24'\n[vercel.images]\n'a/b/c' = 'mine:1'";
    let vercel = with(toml, ServeArgs::default(), None).unwrap().vercel;
    assert_eq!(vercel.default_image.as_deref(), Some("base"));
    assert_eq!(vercel.runtimes["node24"], "node:24");
    assert_eq!(vercel.images["a/b/c"], "mine:1");
    assert_eq!(vercel.max_timeout.0, 2 * 3600 * 1000);
}

#[test]
fn the_key_for_secrets_comes_from_the_environment_or_a_file() {
    let toml = "[secrets]\nkey_file = '/etc/sandkeep/key'";
    let file = with(toml, ServeArgs::default(), None).unwrap().secrets_key;
    assert_eq!(file, KeySource::File("/etc/sandkeep/key".into()));
    let named = || SecretsFile { key_file: Some("/etc/sandkeep/key".into()) };
    let text = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
    let given = secrets_key(Some(text.into()), named()).unwrap();
    assert_eq!(given, KeySource::Given(zeroize::Zeroizing::new([1; 32])));
    for bad in ["", "short", "AQEB"] {
        let failure = secrets_key(Some(bad.into()), named()).unwrap_err();
        assert!(failure.to_string().contains("SANDKEEP_SECRETS_KEY"), "{failure}");
        assert!(failure.hint().is_some());
    }
}

#[test]
fn ports_and_vercels_clients_are_told_the_same_places() {
    let read = |toml: &str| {
        let resolved = with(toml, ServeArgs::default(), None).unwrap();
        let (gateway, vercel) = (resolved.gateway, resolved.vercel);
        (gateway.domain, vercel.domain, gateway.public_url, gateway.wait.as_millis())
    };
    let text = |text: &str| Some(text.to_owned());
    assert_eq!(read(""), (None, None, None, 30_000));
    let old = read("[vercel]\ndomain = 'v.test'\npublic_url = 'https://v.test'");
    assert_eq!(old, (text("v.test"), text("v.test"), text("https://v.test"), 30_000));
    let new = read("[gateway]\ndomain = 'g.test:8443'\nwait = '1500ms'");
    assert_eq!(new, (text("g.test:8443"), text("g.test:8443"), None, 1500));
    let both = read("[gateway]\ndomain = 'g.test'\n[vercel]\ndomain = 'v.test'");
    assert_eq!(both.0, text("g.test"));
    assert_eq!(both.1, text("v.test"));
}

#[test]
fn the_network_outside_is_an_operators_to_describe() {
    let toml = "[network]\nexcept = ['127.0.0.1:8080', '169.254.169.254']\n\
        resolvers = ['10.0.0.53', '[fd00::53]:5353']\nhosts = { 'git.internal' = ['127.0.0.1'] }";
    let network = with(toml, ServeArgs::default(), None).unwrap().network;
    assert_eq!(network.except[0].to_string(), "127.0.0.1/32:8080");
    assert_eq!(network.resolvers[0], "10.0.0.53:53".parse().unwrap());
    assert_eq!(network.resolvers[1], "[fd00::53]:5353".parse().unwrap());
    assert_eq!(network.hosts["git.internal"], ["127.0.0.1".parse::<IpAddr>().unwrap()]);
    for (toml, told) in [
        ("except = ['example.com']", "[network] except[0]: `example.com` is no address"),
        ("resolvers = ['10.0.0.53', 'dns']", "[network] resolvers[1]: `dns`"),
        ("hosts = { 'a' = ['x'] }", "[network] hosts.\"a\": `x` is no address"),
        ("hosts = { '*.a' = ['10.0.0.1'] }", "[network] hosts.\"*.a\": this is no name"),
        ("ca = '/no/such/file'", "[network] ca: cannot read `/no/such/file`"),
        ("ca = '/etc/passwd'", "[network] ca: `/etc/passwd` holds no certificate"),
        ("exept = []", "cannot read the settings"),
    ] {
        let failure = with(&format!("[network]\n{toml}"), ServeArgs::default(), None).unwrap_err();
        assert!(failure.to_string().contains(told), "{toml}: {failure}");
        assert!(failure.hint().is_some(), "{toml}");
    }
}

#[test]
fn machines_and_their_being_the_default_are_settings() {
    let usual = with("", ServeArgs::default(), None).unwrap();
    assert_eq!((usual.driver, usual.microvm), (None, MicrovmSettings::default()));
    let toml = "[defaults]\ndriver = 'microvm'\n[microvm]\nenabled = false\nqemu = '/opt/qemu'\nwarm_hypervisors = 3\nwarm_vms = 2";
    let told = with(toml, ServeArgs::default(), None).unwrap();
    assert_eq!(told.driver.as_deref(), Some("microvm"));
    assert_eq!(told.trash_grace, super::TRASH_GRACE);
    let none = with("[storage]\ntrash_grace = '0s'", ServeArgs::default(), None).unwrap();
    assert!(none.trash_grace.is_zero());
    assert_eq!(told.audit_limit.0, 256 << 20);
    let more = with("[storage]\naudit_log = '2G'", ServeArgs::default(), None).unwrap();
    assert_eq!(more.audit_limit.0, 2 << 30);
    let wanted = MicrovmSettings {
        enabled: false,
        qemu: "/opt/qemu".into(),
        warm_hypervisors: 3,
        warm_vms: 2,
    };
    assert_eq!(told.microvm, wanted);
    let former = toml.replace("warm_hypervisors", "spares").replace("warm_vms", "ready");
    assert_eq!(with(&former, ServeArgs::default(), None).unwrap().microvm, wanted);
}

#[test]
fn what_makes_no_sense_is_refused_with_a_hint() {
    for toml in [
        "lisen = '127.0.0.1:1'",
        "log_format = 'xml'",
        "[tls]\ncertificate = '/a.pem'",
        "[tls]\ncert = '/a.pem'",
        "listen = 7",
        "listen = 'nowhere'",
        "listen = 'off'\nunix_socket = 'off'",
        "[secrets]\nkey = 'abc'",
        "[vercel]\nruntime = 'node24'",
        "[vercel]\nmax_timeout = 'long'",
        "[vercel.runtimes]\nnode24 = 24",
        "[gateway]\ndomains = 'a.test'",
        "[gateway]\ndomain = 'https://a.test'",
        "[gateway]\ndomain = '*.a.test'",
        "[gateway]\npublic_url = 'a.test'",
        "[gateway]\nwait = 'long'",
        "[gateway]\nwait = '2h'",
        "[defaults]\ndriver = 'docker'",
        "[defaults]\nimage = 'host'",
        "[microvm]\nqemu = 'qemu-system-x86_64'",
        "[microvm]\nenabled = 'yes'",
        "[storage]\ntrash_grace = 'long'",
        "[storage]\ntrash = '1h'",
        "[storage]\naudit_log = '10K'",
        "[storage]\naudit_log = 'much'",
        "[microvm]\nwarm_hypervisors = 1000",
        "[microvm]\nwarm_hypervisors = 1\nspares = 1",
        "[microvm]\nwarm_hypervisors = -1",
        "[microvm]\nwarm_vms = 65",
        "[microvm]\nready = 65",
        "[microvm]\nkernel = '/boot/vmlinuz'",
    ] {
        let failure = with(toml, ServeArgs::default(), None).unwrap_err();
        assert!(failure.hint().is_some(), "{toml}: {failure:?}");
    }
}
