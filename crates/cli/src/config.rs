//! Settings of `keep serve`, in two stages.
//!
//! [`File`] is what was written, strictly: an unknown key is an error. [`Resolved`] is what it
//! means on this machine, worked out once and passed down. The command line and the environment win
//! over the file, the file over defaults.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandkeep_core::engine::{CommandRetention, Settings};
use sandkeep_core::model::{AddressRule, DomainPattern, Size, Span};
use sandkeep_core::net::UpstreamSettings;
use sandkeep_core::secret::KeySource;
use sandkeep_server::{GatewaySettings, TlsFiles, VercelSettings};
use serde::Deserialize;
use zeroize::Zeroizing;

mod api;
mod tls;

pub(crate) use self::api::ApiSettings;
use crate::args::{Global, ServeArgs};
use crate::failure::Failure;
use crate::locate;
use crate::logging::LogFormat;

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
    /// How lines of the log are written.
    log_format: Option<String>,
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
    /// HTTPS.
    tls: Option<tls::TlsFile>,
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
    /// Whether it is recorded what commands and sessions change.
    record_changes: Option<bool>,
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
    /// How many hypervisors are started in advance. The former name is `spares`.
    #[serde(alias = "spares")]
    warm_hypervisors: Option<usize>,
    /// How many VMs are booted in advance. The former name is `ready`.
    #[serde(alias = "ready")]
    warm_vms: Option<usize>,
}

/// The largest size of a warm pool: hypervisors of each kind, VMs for each template.
const LARGEST_POOL: usize = 64;

/// How machines of their own are run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MicrovmSettings {
    /// Whether the driver is offered, where this host has what it needs.
    pub(crate) enabled: bool,
    /// The hypervisor.
    pub(crate) qemu: PathBuf,
    /// How many hypervisors are started in advance, of each kind that was restored recently.
    pub(crate) warm_hypervisors: usize,
    /// How many VMs are booted in advance, for each of the images that were used last.
    pub(crate) warm_vms: usize,
}

impl Default for MicrovmSettings {
    fn default() -> Self {
        Self {
            enabled: true,
            qemu: PathBuf::from("/usr/bin/qemu-system-x86_64"),
            warm_hypervisors: 1,
            warm_vms: 1,
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
    /// Where clients reach this server from outside; by default the address given for Vercel's
    /// clients.
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
    /// How lines of the log are written.
    pub(crate) log_format: LogFormat,
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
    /// Whether it is recorded what commands and sessions change.
    pub(crate) record_changes: bool,
    /// Who may reach the server.
    pub(crate) api: ApiSettings,
    /// Certificate and key, if the addresses speak TLS.
    pub(crate) tls: Option<TlsFiles>,
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
        log_format: match (args.log_format, file.log_format) {
            (Some(format), _) => format,
            (None, Some(text)) => text.parse()?,
            (None, None) => LogFormat::default(),
        },
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
        record_changes: file.storage.record_changes.unwrap_or(true),
        api: api::api(file.api)?,
        tls: file.tls.map(tls::tls).transpose()?.flatten(),
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
        many if many > LARGEST_POOL => {
            let hint = format!("write a number up to {LARGEST_POOL}; 0 for none");
            Err(Failure::here(format!("[microvm] {name}: {many} are too many")).with_hint(hint))
        }
        some => Ok(some),
    };
    Ok(MicrovmSettings {
        enabled: file.enabled.unwrap_or(usual.enabled),
        qemu,
        warm_hypervisors: some("warm_hypervisors", file.warm_hypervisors, usual.warm_hypervisors)?,
        warm_vms: some("warm_vms", file.warm_vms, usual.warm_vms)?,
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

/// A setting that is given for one and not for the other holds for both.
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
    let text = std::fs::read_to_string(path).map_err(|error| {
        Failure::caused(cannot(), error)
            .with_hint("name a readable file with --config; `keep config` prints one to begin with")
    })?;
    toml::from_str(&text).map_err(|error| {
        let hint = "`keep config` prints all settings";
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
mod documented;
#[cfg(test)]
mod tests;
