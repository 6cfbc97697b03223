//! Settings of `keep serve`, in two stages.
//!
//! [`File`] is what was written, strictly: a key nobody knows is an error, not a shrug. [`Resolved`]
//! is what it means on this machine, worked out once and passed down. The command line and the
//! environment win over the file, the file over defaults.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandkeep_core::engine::{CommandRetention, Settings};
use sandkeep_core::model::{AddressRule, DomainPattern, Size, Span};
use sandkeep_core::net::UpstreamSettings;
use sandkeep_core::secret::KeySource;
use sandkeep_server::{GatewaySettings, VercelSettings};
use serde::Deserialize;
use zeroize::Zeroizing;

mod api;

pub(crate) use self::api::ApiSettings;
use crate::args::{Global, ServeArgs};
use crate::failure::Failure;
use crate::locate;

const DEFAULT_LISTEN: &str = "127.0.0.1:7777";
const OFF: &str = "off";
/// The environment variable with the key that secrets are sealed with.
pub(crate) const SECRETS_KEY: &str = "SANDKEEP_SECRETS_KEY";

/// What a settings file says.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// The data directory.
    data: Option<PathBuf>,
    /// The address for HTTP, or `off`.
    listen: Option<String>,
    /// The socket file for HTTP, or `off`.
    unix_socket: Option<String>,
    /// What is logged.
    log: Option<String>,
    /// Whether the image `host` is made at the start.
    host_image: Option<bool>,
    /// How ports inside sandboxes are reached.
    #[serde(default)]
    gateway: GatewayFile,
    /// How Vercel's clients are served.
    #[serde(default)]
    vercel: VercelFile,
    /// How secrets are kept.
    #[serde(default)]
    secrets: SecretsFile,
    /// What sandboxes share of the world outside.
    #[serde(default)]
    network: NetworkFile,
    /// What sandboxes are that do not say.
    #[serde(default)]
    defaults: DefaultsFile,
    /// Machines of their own.
    #[serde(default)]
    microvm: MicrovmFile,
    /// How data is stored.
    #[serde(default)]
    storage: StorageFile,
    /// Who may reach the server.
    #[serde(default)]
    api: api::ApiFile,
}

/// What a settings file says about how data is stored.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct StorageFile {
    /// How long what was deleted stays in the trash.
    trash_grace: Option<String>,
    /// How many records of commands a sandbox keeps.
    commands_kept: Option<u64>,
    /// How much disk space they and their logs may take, for each sandbox.
    command_logs: Option<String>,
    /// How much disk space the audit log of a project may take.
    audit_log: Option<String>,
}

/// How long what was deleted stays in the trash, unless the settings say otherwise.
const TRASH_GRACE: Duration = Duration::from_secs(3600);

/// What a settings file says about sandboxes that do not say themselves.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct DefaultsFile {
    /// The driver.
    driver: Option<String>,
}

/// What a settings file says about machines of their own.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct MicrovmFile {
    /// Whether the driver is offered, where this host has what it needs.
    enabled: Option<bool>,
    /// The hypervisor.
    qemu: Option<PathBuf>,
    /// How many hypervisors wait for the next machine.
    spares: Option<usize>,
    /// How many machines wait for the next sandbox.
    ready: Option<usize>,
}

/// The most hypervisors that wait for a machine, of each kind, and the most machines that wait for a sandbox.
const MOST_SPARES: usize = 64;

/// How machines of their own are run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MicrovmSettings {
    /// Whether the driver is offered, where this host has what it needs.
    pub(crate) enabled: bool,
    /// The hypervisor.
    pub(crate) qemu: PathBuf,
    /// How many hypervisors wait for the next machine, of each kind that was restored lately.
    pub(crate) spares: usize,
    /// How many machines wait for the next sandbox, for each of the images that were used last.
    pub(crate) ready: usize,
}

impl Default for MicrovmSettings {
    fn default() -> Self {
        Self {
            enabled: true,
            qemu: PathBuf::from("/usr/bin/qemu-system-x86_64"),
            spares: 1,
            ready: 1,
        }
    }
}

/// What a settings file says about the network outside.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct NetworkFile {
    /// Addresses that may be reached although they are always refused.
    #[serde(default)]
    except: Vec<String>,
    /// Name servers, instead of the host's.
    #[serde(default)]
    resolvers: Vec<String>,
    /// Names that are answered here.
    #[serde(default)]
    hosts: BTreeMap<String, Vec<String>>,
    /// A file of certificates that are trusted beside the host's own.
    ca: Option<PathBuf>,
}

/// What a settings file says about secrets.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SecretsFile {
    /// The file with the key that secrets are sealed with.
    key_file: Option<PathBuf>,
}

/// What a settings file says about ports.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct GatewayFile {
    /// The domain whose subdomains lead to ports; Vercel's clients' if absent.
    domain: Option<String>,
    /// Where clients reach this server from outside; what Vercel's clients are told if absent.
    public_url: Option<String>,
    /// How long a request waits for a sandbox to wake and a port to open.
    wait: Option<String>,
}

/// What a settings file says about Vercel's clients.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct VercelFile {
    /// The image their default machine is made of; `host` if absent.
    default_image: Option<String>,
    /// Which images runtimes stand for.
    #[serde(default)]
    runtimes: BTreeMap<String, String>,
    /// Which images their images stand for.
    #[serde(default)]
    images: BTreeMap<String, String>,
    /// The longest a session may last.
    max_timeout: Option<String>,
    /// Where clients reach this server from outside.
    public_url: Option<String>,
    /// The domain whose subdomains lead to ports.
    domain: Option<String>,
}

/// How this server runs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Resolved {
    /// The data directory, absolute.
    pub(crate) data: PathBuf,
    /// Where to listen for HTTP.
    pub(crate) listen: Vec<SocketAddr>,
    /// The socket file for HTTP.
    pub(crate) unix_socket: Option<PathBuf>,
    /// What is logged.
    pub(crate) log: String,
    /// Whether the image `host` is made at the start.
    pub(crate) host_image: bool,
    /// How ports inside sandboxes are reached.
    pub(crate) gateway: GatewaySettings,
    /// How Vercel's clients are served.
    pub(crate) vercel: VercelSettings,
    /// Where the key comes from that secrets are sealed with.
    pub(crate) secrets_key: KeySource,
    /// What sandboxes share of the world outside.
    pub(crate) network: UpstreamSettings,
    /// The driver of sandboxes that ask for none.
    pub(crate) driver: Option<String>,
    /// How machines of their own are run.
    pub(crate) microvm: MicrovmSettings,
    /// How long what was deleted stays in the trash.
    pub(crate) trash_grace: Duration,
    /// How much disk space the audit log of a project may take.
    pub(crate) audit_limit: Size,
    /// How much of its commands a sandbox keeps.
    pub(crate) commands: CommandRetention,
    /// Who may reach the server.
    pub(crate) api: ApiSettings,
}

/// Works out how to serve.
pub(crate) fn resolve(global: &Global, args: ServeArgs) -> Result<Resolved, Failure> {
    let file = match &args.config {
        Some(path) => read(path)?,
        None => File::default(),
    };
    let data = global.data.clone().or(file.data).unwrap_or_else(locate::default_data);
    let data = std::path::absolute(&data)
        .map_err(|error| Failure::caused("cannot determine the working directory", error))?;
    let listen = args.listen.or(file.listen).unwrap_or_else(|| DEFAULT_LISTEN.to_owned());
    let unix_socket =
        match args.unix_socket.or(file.unix_socket).as_deref() {
            Some(OFF) => None,
            Some(path) => Some(std::path::absolute(path).map_err(|error| {
                Failure::caused("cannot determine the working directory", error)
            })?),
            None => Some(data.join("keep.sock")),
        };
    let listen = if listen == OFF { Vec::new() } else { addresses(&listen)? };
    if listen.is_empty() && unix_socket.is_none() {
        let hint = "leave one of --listen and --unix-socket on";
        return Err(Failure::here("no address to listen on").with_hint(hint));
    }
    let mut vercel = vercel(file.vercel)?;
    let gateway = gateway(file.gateway, &mut vercel)?;
    Ok(Resolved {
        data,
        listen,
        unix_socket,
        log: args.log.or(file.log).unwrap_or_else(|| "info".to_owned()),
        host_image: !args.no_host_image && file.host_image.unwrap_or(true),
        gateway,
        vercel,
        secrets_key: secrets_key(std::env::var_os(SECRETS_KEY), file.secrets)?,
        network: network(file.network)?,
        driver: default_driver(file.defaults)?,
        microvm: microvm(file.microvm)?,
        trash_grace: trash_grace(file.storage.trash_grace.as_deref())?,
        audit_limit: audit_limit(file.storage.audit_log.as_deref())?,
        commands: commands(&file.storage)?,
        api: api::api(file.api)?,
    })
}

fn commands(file: &StorageFile) -> Result<CommandRetention, Failure> {
    let usual = CommandRetention::default();
    let count = file.commands_kept.unwrap_or(usual.count);
    if count == 0 {
        return Err(Failure::here("[storage] commands_kept: must be at least 1")
            .with_hint("write at least 1, like `2000`"));
    }
    let bytes = match &file.command_logs {
        None => usual.bytes,
        Some(text) => text.parse::<Size>().map_err(|error| {
            Failure::here(format!("[storage] command_logs: {error}"))
                .with_hint("write it like `256MiB`")
        })?,
    };
    Ok(CommandRetention { count, bytes })
}

/// The least that an audit log may take: it is removed in pieces.
const LEAST_AUDIT_LOG: u64 = 1 << 20;

fn audit_limit(text: Option<&str>) -> Result<Size, Failure> {
    let Some(text) = text else { return Ok(Settings::default().audit_limit) };
    let bad = |reason: String| {
        Failure::here(format!("[storage] audit_log: {reason}"))
            .with_hint("write it like `256MiB`; at least 1 MiB")
    };
    let size = text.parse::<Size>().map_err(|error| bad(error.to_string()))?;
    if size.0 < LEAST_AUDIT_LOG { Err(bad(format!("`{text}` is too little"))) } else { Ok(size) }
}

fn trash_grace(text: Option<&str>) -> Result<Duration, Failure> {
    let Some(text) = text else { return Ok(TRASH_GRACE) };
    let span = text.parse::<Span>().map_err(|error| {
        Failure::here(format!("[storage] trash_grace: {error}"))
            .with_hint("write it like `1h`; `0s` deletes at once")
    })?;
    Ok(span.duration())
}

fn default_driver(file: DefaultsFile) -> Result<Option<String>, Failure> {
    const DRIVERS: [&str; 2] = ["container", "microvm"];
    if let Some(name) = &file.driver
        && !DRIVERS.contains(&name.as_str())
    {
        let hint = "write `container` or `microvm`";
        return Err(Failure::here(format!("[defaults] driver: there is no driver `{name}`"))
            .with_hint(hint));
    }
    Ok(file.driver)
}

fn microvm(file: MicrovmFile) -> Result<MicrovmSettings, Failure> {
    let usual = MicrovmSettings::default();
    let qemu = file.qemu.unwrap_or(usual.qemu);
    if !qemu.is_absolute() {
        let hint = "write it from the root: `/usr/bin/qemu-system-x86_64`";
        let told = format!("[microvm] qemu: `{}` is no absolute path", qemu.display());
        return Err(Failure::here(told).with_hint(hint));
    }
    let some = |name: &str, told: Option<usize>, usual: usize| match told.unwrap_or(usual) {
        many if many > MOST_SPARES => {
            let hint = format!("write a number up to {MOST_SPARES}; 0 for none");
            Err(Failure::here(format!("[microvm] {name}: {many} are too many")).with_hint(hint))
        }
        some => Ok(some),
    };
    Ok(MicrovmSettings {
        enabled: file.enabled.unwrap_or(usual.enabled),
        qemu,
        spares: some("spares", file.spares, usual.spares)?,
        ready: some("ready", file.ready, usual.ready)?,
    })
}

fn network(file: NetworkFile) -> Result<UpstreamSettings, Failure> {
    let wrong = |field: &str, error: &dyn std::fmt::Display, hint: &str| {
        Failure::here(format!("[network] {field}: {error}")).with_hint(hint)
    };
    let mut settings = UpstreamSettings::default();
    for (index, text) in file.except.iter().enumerate() {
        let rule = text.parse::<AddressRule>().map_err(|error| {
            wrong(&format!("except[{index}]"), &error, "write an address, like `127.0.0.1:8080`")
        })?;
        settings.except.push(rule);
    }
    for (index, text) in file.resolvers.iter().enumerate() {
        let plain = text.parse::<IpAddr>().map(|address| SocketAddr::new(address, 53));
        let resolver = plain.or_else(|_| text.parse()).map_err(|_| {
            let problem = format!("`{text}` is no address of a name server");
            let hint = "write `10.0.0.53`, `10.0.0.53:5353` or `[fd00::53]:53`";
            wrong(&format!("resolvers[{index}]"), &problem, hint)
        })?;
        settings.resolvers.push(resolver);
    }
    for (name, texts) in file.hosts {
        let field = format!("hosts.\"{name}\"");
        let pattern = name.parse::<DomainPattern>();
        if !pattern.is_ok_and(|pattern| !pattern.as_str().contains('*')) {
            return Err(wrong(&field, &"this is no name", "write one like `git.internal`"));
        }
        let address = |text: &String| {
            text.parse::<IpAddr>().map_err(|_| {
                let problem = format!("`{text}` is no address");
                wrong(&field, &problem, "write a list of addresses, like [\"10.0.0.5\"]")
            })
        };
        let addresses = texts.iter().map(address).collect::<Result<_, _>>()?;
        settings.hosts.insert(name, addresses);
    }
    if let Some(path) = file.ca {
        let hint = "name a file of certificates in PEM form";
        let text = std::fs::read_to_string(&path).map_err(|error| {
            wrong("ca", &format!("cannot read `{}`: {error}", path.display()), hint)
        })?;
        if !text.contains("-----BEGIN CERTIFICATE-----") {
            return Err(wrong("ca", &format!("`{}` holds no certificate", path.display()), hint));
        }
        settings.ca = Some(path);
    }
    Ok(settings)
}

/// Where the server's key is. `from_env` is what [`SECRETS_KEY`] holds.
pub(crate) fn secrets_key(
    from_env: Option<OsString>,
    file: SecretsFile,
) -> Result<KeySource, Failure> {
    if let Some(text) = from_env {
        let text = Zeroizing::new(text.into_string().unwrap_or_default());
        return KeySource::from_text(&text).map_err(|error| {
            let hint = "make one with `head -c 32 /dev/urandom | base64`";
            Failure::caused(format!("{SECRETS_KEY} is not a valid key"), error).with_hint(hint)
        });
    }
    let Some(path) = file.key_file else { return Ok(KeySource::DataDirectory) };
    std::path::absolute(path)
        .map(KeySource::File)
        .map_err(|error| Failure::caused("cannot determine the working directory", error))
}

/// What is said of one and not of the other holds for both.
fn gateway(file: GatewayFile, vercel: &mut VercelSettings) -> Result<GatewaySettings, Failure> {
    let usual = GatewaySettings::default();
    let domain = file.domain.or_else(|| vercel.domain.clone());
    if let Some(domain) = &domain {
        check_domain(domain)?;
    }
    let public_url = file.public_url.or_else(|| vercel.public_url.clone());
    if let Some(url) = &public_url
        && !url.starts_with("http://")
        && !url.starts_with("https://")
    {
        let hint = "write it like `https://keep.example.com`";
        return Err(Failure::here(format!("invalid public_url `{url}`")).with_hint(hint));
    }
    vercel.domain = vercel.domain.take().or_else(|| domain.clone());
    vercel.public_url = vercel.public_url.take().or_else(|| public_url.clone());
    let wait = match file.wait {
        None => usual.wait,
        Some(text) => {
            let hint = "write a span like `30s`, of an hour at the most";
            let span: Span = text.parse().map_err(|error| {
                Failure::caused(format!("invalid wait `{text}`"), error).with_hint(hint)
            })?;
            if span > Span::seconds(3600) {
                return Err(
                    Failure::here(format!("a wait of `{text}` is too long")).with_hint(hint)
                );
            }
            span.duration()
        }
    };
    Ok(GatewaySettings { domain, public_url, wait, ..usual })
}

fn check_domain(domain: &str) -> Result<(), Failure> {
    let (host, port) = match domain.rsplit_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (domain, None),
    };
    let label = |label: &str| {
        let plain = label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        !label.is_empty() && label.len() <= 63 && plain
    };
    if host.split('.').all(label) && port.is_none_or(|port| port.parse::<u16>().is_ok()) {
        return Ok(());
    }
    let hint = "write a name like `keep.example.com`, without `https://` and `*`";
    Err(Failure::here(format!("`{domain}` is not a domain")).with_hint(hint))
}

fn vercel(file: VercelFile) -> Result<VercelSettings, Failure> {
    let VercelFile { default_image, runtimes, images, max_timeout, public_url, domain } = file;
    let usual = VercelSettings::default();
    let max_timeout = match max_timeout {
        Some(text) => text.parse().map_err(|error| {
            let hint = "write a span like `24h` or `7d`";
            Failure::caused(format!("invalid max_timeout `{text}`"), error).with_hint(hint)
        })?,
        None => usual.max_timeout,
    };
    Ok(VercelSettings { default_image, runtimes, images, max_timeout, public_url, domain })
}

fn read(path: &Path) -> Result<File, Failure> {
    let cannot = || format!("cannot read the settings in `{}`", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| Failure::caused(cannot(), error))?;
    toml::from_str(&text).map_err(|error| {
        let hint = "`keep serve --help` lists the settings";
        Failure::caused(cannot(), error.to_string()).with_hint(hint)
    })
}

fn addresses(text: &str) -> Result<Vec<SocketAddr>, Failure> {
    let hint = "write ADDR:PORT, like 127.0.0.1:7777, or `off`";
    let found = text.to_socket_addrs().map_err(|error| {
        Failure::caused(format!("invalid listen address `{text}`"), error).with_hint(hint)
    })?;
    Ok(found.collect())
}

#[cfg(test)]
mod tests {
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
        let global =
            Global { json: false, url: None, key: None, project: None, data: data.map(Into::into) };
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
            let failure =
                with(&format!("[network]\n{toml}"), ServeArgs::default(), None).unwrap_err();
            assert!(failure.to_string().contains(told), "{toml}: {failure}");
            assert!(failure.hint().is_some(), "{toml}");
        }
    }

    #[test]
    fn machines_and_their_being_the_default_are_settings() {
        let usual = with("", ServeArgs::default(), None).unwrap();
        assert_eq!((usual.driver, usual.microvm), (None, MicrovmSettings::default()));
        let toml = "[defaults]\ndriver = 'microvm'\n[microvm]\nenabled = false\nqemu = '/opt/qemu'\nspares = 3\nready = 2";
        let told = with(toml, ServeArgs::default(), None).unwrap();
        assert_eq!(told.driver.as_deref(), Some("microvm"));
        assert_eq!(told.trash_grace, super::TRASH_GRACE);
        let none = with("[storage]\ntrash_grace = '0s'", ServeArgs::default(), None).unwrap();
        assert!(none.trash_grace.is_zero());
        assert_eq!(told.audit_limit.0, 256 << 20);
        let more = with("[storage]\naudit_log = '2G'", ServeArgs::default(), None).unwrap();
        assert_eq!(more.audit_limit.0, 2 << 30);
        let wanted =
            MicrovmSettings { enabled: false, qemu: "/opt/qemu".into(), spares: 3, ready: 2 };
        assert_eq!(told.microvm, wanted);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_a_hint() {
        for toml in [
            "lisen = '127.0.0.1:1'",
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
            "[microvm]\nspares = 1000",
            "[microvm]\nspares = -1",
            "[microvm]\nready = 65",
            "[microvm]\nkernel = '/boot/vmlinuz'",
        ] {
            let failure = with(toml, ServeArgs::default(), None).unwrap_err();
            assert!(failure.hint().is_some(), "{toml}: {failure:?}");
        }
    }
}
