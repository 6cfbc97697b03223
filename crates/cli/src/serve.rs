//! `keep serve`: puts the parts together and serves until it is stopped.
//!
//! Order matters: the data directory is locked first (opening the store does it), sockets are opened
//! before the engine, so that a taken port is reported before anything is begun, and the file with
//! the server's address for clients is written last, when the server answers.

use std::ffi::OsString;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use sandkeep_core::catalog::DiskCatalog;
use sandkeep_core::db::{Index, MirroredDb};
use sandkeep_core::driver::Driver;
use sandkeep_core::driver::container::ContainerDriver;
use sandkeep_core::engine::{Engine, Parts, Settings, WebhookSettings};
use sandkeep_core::model::{Name, Scope};
use sandkeep_core::store::Store;
use sandkeep_core::store::image::{HOST, ImageSettings, Images, Reporter};
use sandkeep_server::{ServeConfig, ServeError, Server, TlsFiles};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{Global, ServeArgs};
use crate::config::{self, MicrovmSettings, Resolved};
use crate::failure::Failure;
use crate::greeting::greeting;
use crate::host;
use crate::locate::ClientFile;
use crate::logging;
use crate::machines::LateMicrovm;
use crate::notify;
use crate::screen::Screen;

/// The project of the first key.
const DEFAULT_PROJECT: &str = "default";

/// The index, which can always be made again from the rest.
const INDEX: &str = "index.sqlite";

/// How many cages are begun ahead of the next starts.
const PREBUILT: usize = 2;

pub(crate) async fn serve(global: &Global, args: ServeArgs) -> Result<(), Failure> {
    let config = config::resolve(global, args)?;
    host::need_root("keep serve")?;
    logging::start(&config.log, config.log_format)?;
    raise_file_limit();
    warn_of_plain_text(&config);
    // Listened for from the start: a stop that comes early must not be lost.
    let ended = told_to_end()?;
    let store = open_store(&config.data)?;
    let server = Server::bind(ServeConfig {
        tcp: config.listen.clone(),
        unix: config.unix_socket.clone(),
        scratch: config.data.join("tmp"),
        limits: config.api.limits(),
        gateway: config.gateway.clone(),
        vercel: config.vercel.clone(),
        web: config.api.web.clone(),
        tls: config.tls.clone(),
    })
    .await
    .map_err(|error| {
        let hint = match error {
            ServeError::Tls(_) => {
                "make a certificate and key with `keep tls init`, or correct [tls] in the settings"
                    .to_owned()
            }
            _ if is_full(&store) => no_room_hint(&config.data),
            _ => "another server may have it; choose another with --listen or --unix-socket"
                .to_owned(),
        };
        Failure::caused("cannot listen", error).with_hint(hint)
    })?;
    let mut settings = Settings {
        secrets_key: config.secrets_key.clone(),
        network: config.network.clone(),
        warm_vms: config.microvm.warm_vms,
        trash_grace: config.trash_grace,
        audit_limit: config.audit_limit,
        commands: config.commands,
        record_changes: config.record_changes,
        webhooks: WebhookSettings {
            public_url: config.gateway.public_url.clone(),
            ..WebhookSettings::default()
        },
        ..Settings::default()
    };
    if let Some(driver) = &config.driver {
        settings.default_driver.clone_from(driver);
    }
    let (engine, drivers) = open_engine(store, settings, &config.microvm).await?;
    let file = introduce(&engine, &config, &server).await?;
    Screen::new(global.json).text(&greeting(&config, &file))?;
    notify::tell(notify::READY);
    let mut background = tokio::task::JoinSet::new();
    if config.host_image {
        background.spawn(make_host_image(engine.clone()));
    }
    background.spawn(crate::memory::give_back());
    server.run(engine.clone(), ended).await;
    background.shutdown().await;
    notify::tell(notify::STOPPING);
    tracing::info!("shutting down; sandboxes keep running");
    engine.shutdown().await;
    drivers.retire();
    Ok(())
}

/// Every connection of every sandbox is a descriptor of this process, and the usual limit is for programs that have few.
fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

/// Keys, files and secrets go over the network as they are, unless something in front of this server speaks TLS.
fn warn_of_plain_text(config: &Resolved) {
    if config.tls.is_some() {
        return;
    }
    let open = in_plain_text(&config.listen, config.gateway.public_url.as_deref());
    if !open.is_empty() {
        tracing::warn!(
            listen = open.join(", "),
            "WARNING: listening beyond loopback without TLS. Keys, secrets and files cross the network in plain text; whoever reads a \
             key has your sandboxes. Set [tls] (`keep tls init` makes a certificate), or put a TLS proxy in front and set \
             `[gateway] public_url = \"https://...\"`, or listen on 127.0.0.1"
        );
    }
}

/// The addresses beyond loopback on which nothing speaks TLS, as far as the settings say.
fn in_plain_text(listen: &[SocketAddr], public_url: Option<&str>) -> Vec<String> {
    if public_url.is_some_and(|url| url.starts_with("https://")) {
        return Vec::new();
    }
    let beyond = listen.iter().filter(|address| !address.ip().to_canonical().is_loopback());
    beyond.map(ToString::to_string).collect()
}

/// Opens the store, which locks the data directory.
pub(crate) fn open_store(data: &Path) -> Result<Store, Failure> {
    let store = Store::open(data).map_err(|error| {
        let locked = matches!(error, sandkeep_core::store::StoreError::Locked { .. });
        let full = error.is_no_room();
        let failure = Failure::caused(format!("cannot open `{}`", data.display()), error);
        match (locked, full) {
            (true, _) => failure
                .with_hint("stop the server that uses it, or choose another directory with --data"),
            (_, true) => failure.with_hint(no_room_hint(data)),
            _ => failure.with_hint(
                "name a directory with --data that this user can write to; without root, `sudo keep serve`",
            ),
        }
    })?;
    if is_full(&store) {
        // It is made again from the rest, in memory for now, and a server needs a few blocks to start.
        forget_index(data)?;
    }
    Ok(store)
}

/// With less than this free not even a socket can be made.
const FULL: u64 = 64 << 10;

fn is_full(store: &Store) -> bool {
    store.free_space().is_ok_and(|(free, _)| free < FULL)
}

/// What to do about a full disk.
fn no_room_hint(data: &Path) -> String {
    format!(
        "the filesystem of `{}` is full: free some space there, then start the server again",
        data.display()
    )
}

/// The drivers of an engine.
pub(crate) struct Drivers {
    container: ContainerDriver,
    microvm: Arc<LateMicrovm>,
    claim: host::Claim,
}

impl Drivers {
    /// Removes what they need on the host; leaves what sandboxes still use.
    pub(crate) fn retire(self) {
        self.container.retire();
        self.microvm.retire();
        self.claim.retire();
    }
}

/// Opens the engine on everything this host has.
pub(crate) async fn open_engine(
    store: Store,
    mut settings: Settings,
    machines: &MicrovmSettings,
) -> Result<(Engine, Drivers), Failure> {
    let data = store.data_dir().to_path_buf();
    let agent = host::install_agent(&data.join("bin")).map_err(|error| {
        let full = error.kind() == std::io::ErrorKind::StorageFull;
        let failure = Failure::caused("cannot write the agent program", error);
        if full { failure.with_hint(no_room_hint(&data)) } else { failure }
    })?;
    let claim = host::claim(&store).await?;
    let config = host::container_config(agent.clone(), claim.mark());
    let container = ContainerDriver::new(config).map_err(|error| {
        Failure::caused("cannot run sandboxes on this host", error)
            .with_hint("`keep doctor` shows what is missing and how to fix it")
    })?;
    let container = container.with_prebuilt(PREBUILT);
    let microvm = Arc::new(LateMicrovm::new(&agent, &data, claim.mark(), machines));
    settings.late_drivers = Some(microvm.clone());
    let db = Index::open(&data.join(INDEX), store.clone())
        .await
        .map_err(|error| Failure::caused("cannot create the index", error))?;
    let db = MirroredDb::new(Arc::new(db))
        .await
        .map_err(|error| Failure::caused("cannot read the index", error))?;
    let from = ImageSettings {
        docker_config: docker_config(),
        helper_env: without_ours(std::env::vars_os()),
        ..ImageSettings::default()
    };
    let images = Images::new(store.clone(), from);
    let mut drivers: Vec<Arc<dyn Driver>> = vec![Arc::new(container.clone())];
    drivers.extend(microvm.driver().map(|driver| Arc::new(driver) as Arc<dyn Driver>));
    let catalog = Arc::new(DiskCatalog::new(store.clone(), Arc::new(db)));
    let parts = Parts { store, images, catalog, drivers, settings };
    let engine = Engine::open(parts)
        .await
        .map_err(|error| Failure::caused("cannot read the data directory", error))?;
    Ok((engine, Drivers { container, microvm, claim }))
}

/// Has the index made again when the engine is opened.
pub(crate) fn forget_index(data: &Path) -> Result<(), Failure> {
    // An index without its stamp is not used, whatever state its files are in.
    let stamp = data.join(INDEX).with_extension("stamp");
    match fs::remove_file(&stamp) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Failure::caused(format!("cannot remove `{}`", stamp.display()), error))
        }
        _ => Ok(()),
    }
}

/// Resolves when the server is to end.
fn told_to_end() -> Result<impl Future<Output = ()> + Send, Failure> {
    let on = |kind: SignalKind| {
        signal(kind).map_err(|error| Failure::caused("cannot listen for signals", error))
    };
    let (mut interrupt, mut terminate) =
        (on(SignalKind::interrupt())?, on(SignalKind::terminate())?);
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// Makes sure that there is a project and a key, and writes them down for clients on this machine.
async fn introduce(
    engine: &Engine,
    config: &Resolved,
    server: &Server,
) -> Result<ClientFile, Failure> {
    let cannot = |error| Failure::caused("cannot create the first project and key", error);
    let project: Name = DEFAULT_PROJECT
        .parse()
        .map_err(|error| Failure::caused("invalid name for the first project", error))?;
    if engine.projects().is_empty() && engine.locked_projects().is_empty() {
        if ClientFile::is_in(&config.data) {
            // Clients were served from here. A new project would not have the bounds of the old one.
            engine.lock_project(project.clone(), "its manifest is missing");
        } else {
            engine.create_project(project.clone()).await.map_err(cannot)?;
        }
    }
    let known = ClientFile::read(&config.data).ok().map(|file| file.key);
    let key = match known.filter(|key| engine.authenticate(key).is_ok()) {
        Some(key) => key,
        None if !engine.locked_projects().is_empty() => {
            tracing::error!(
                "the project of the local operator's key cannot be read; using a temporary key until the server stops"
            );
            engine.emergency_key(project)
        }
        None => {
            let project = engine.projects().into_iter().next().map_or(project, |first| first.name);
            let label = "local".to_owned();
            let (_, secret) =
                engine.create_key(&project, label, Scope::Admin, None).await.map_err(cannot)?;
            secret
        }
    };
    let file = ClientFile {
        url: server.addresses().first().map(|address| own_url(*address, config.tls.is_some())),
        unix_socket: config.unix_socket.clone(),
        key,
        ca: config.tls.as_ref().and_then(own_ca),
    };
    if ClientFile::read(&config.data).is_ok_and(|there| there == file) {
        return Ok(file);
    }
    match file.write(&config.data) {
        // Those who know where the server is can still make room.
        Err(error) if error.kind() == std::io::ErrorKind::StorageFull => {
            tracing::error!(%error, "the disk is full: cannot write the file with the server's address and key");
        }
        written => written.map_err(|error| {
            Failure::caused("cannot write the file with the server's address and key", error)
        })?,
    }
    Ok(file)
}

/// Where clients on this machine find the server.
fn own_url(address: SocketAddr, tls: bool) -> String {
    // A certificate has no name for "all addresses".
    let ip = match address.ip() {
        IpAddr::V4(ip) if tls && ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if tls && ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    let scheme = if tls { "https" } else { "http" };
    format!("{scheme}://{}", SocketAddr::new(ip, address.port()))
}

/// The CA that `keep tls init` made beside a certificate.
fn own_ca(files: &TlsFiles) -> Option<PathBuf> {
    let ca = files.certificate.parent()?.join("ca.pem");
    ca.is_file().then_some(ca)
}

/// Makes the image `host` in the background. A sandbox that comes first makes it itself.
async fn make_host_image(engine: Engine) {
    let begun = Instant::now();
    if engine.images().get(HOST).await.is_ok() {
        return;
    }
    tracing::info!("building the image `{HOST}` from this host; this takes some seconds, once");
    match engine.images().host(false, &Reporter::silent()).await {
        Ok(_) => {
            let seconds = begun.elapsed().as_secs_f64();
            tracing::info!("the image `{HOST}` is ready after {seconds:.1} s");
        }
        Err(error) => {
            let error: &dyn std::error::Error = &error;
            tracing::error!(
                error,
                "cannot build the image `{HOST}`; the next sandbox that uses it will retry"
            );
        }
    }
}

/// The operator's variables, for credential helpers. Ours are not among them: the server's key is one.
fn without_ours(vars: impl Iterator<Item = (OsString, OsString)>) -> Vec<(OsString, OsString)> {
    vars.filter(|(name, _)| !name.as_encoded_bytes().starts_with(b"SANDKEEP_")).collect()
}

/// Where docker keeps credentials for registries.
fn docker_config() -> Option<PathBuf> {
    let folder = match std::env::var_os("DOCKER_CONFIG") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(std::env::var_os("HOME")?).join(".docker"),
    };
    Some(folder.join("config.json"))
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::in_plain_text;

    #[test]
    fn listening_beyond_loopback_without_tls_is_noticed() {
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let local = [at("127.0.0.1:1"), at("[::1]:1")];
        assert_eq!(in_plain_text(&local, None), Vec::<String>::new());
        let open = [at("127.0.0.1:1"), at("0.0.0.0:7777"), at("[::]:7777")];
        assert_eq!(in_plain_text(&open, None), ["0.0.0.0:7777", "[::]:7777"]);
        assert_eq!(in_plain_text(&open, Some("http://keep.example.com")).len(), 2);
        assert_eq!(in_plain_text(&open, Some("https://keep.example.com")), Vec::<String>::new());
    }
}
