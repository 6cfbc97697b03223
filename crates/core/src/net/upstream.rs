//! The network outside, the same for all sandboxes of a daemon: decides how names are resolved, which addresses are refused
//! whatever a policy says, which certificates TLS trusts, and how connections are made.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{
    ConnectionConfig, NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts,
};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::{Name, RData, RecordType};
use hickory_resolver::system_conf::read_system_conf;
use ipnet::IpNet;
use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::runtime::Handle;

use super::special_addresses::{self, Destination, HOST_V4};
use crate::model::AddressRule;

/// What an operator says about the network outside.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// Addresses that may be reached although they are always refused; policies still apply.
    pub except: Vec<AddressRule>,
    /// Name servers, instead of the host's.
    pub resolvers: Vec<SocketAddr>,
    /// Names that are answered here.
    pub hosts: BTreeMap<String, Vec<IpAddr>>,
    /// A file of certificates that are trusted beside the host's own.
    pub ca: Option<PathBuf>,
}

/// What all sandboxes of a daemon share of the network.
pub struct Upstream {
    except: Vec<AddressRule>,
    resolvers: Vec<SocketAddr>,
    hosts: BTreeMap<String, Vec<IpAddr>>,
    extra: Vec<CertificateDer<'static>>,
    tls: OnceLock<Arc<ClientConfig>>,
    resolver: Mutex<Resolver>,
    own: Arc<Mutex<Own>>,
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upstream").field("except", &self.except).finish_non_exhaustive()
    }
}

/// The name by which a sandbox knows its host.
const HOST_NAME: &str = "host.sandkeep.internal";

/// How long somebody outside may take to answer.
const DIAL_WITHIN: Duration = Duration::from_secs(20);

/// How long an outside peer may be silent before a keep-alive is sent.
const ASK_AFTER: Duration = Duration::from_secs(60);

/// How long a name server may take, its repeats included.
const RESOLVE_WITHIN: Duration = Duration::from_secs(12);

/// How old the list of the host's addresses and the look at its resolver's file may be.
const FRESH: Duration = Duration::from_secs(5);

impl Upstream {
    /// Reads what it needs of the host.
    ///
    /// # Errors
    ///
    /// Returns an error when the file of certificates cannot be read or holds none.
    pub fn new(settings: UpstreamSettings) -> io::Result<Self> {
        let extra = settings.ca.as_deref().map(certificates).transpose()?.unwrap_or_default();
        let plain = |name: String| name.trim_end_matches('.').to_ascii_lowercase();
        Ok(Self {
            resolver: Mutex::new(Resolver::new(&settings.resolvers)),
            except: settings.except,
            resolvers: settings.resolvers,
            hosts: settings.hosts.into_iter().map(|(name, ips)| (plain(name), ips)).collect(),
            extra,
            tls: OnceLock::new(),
            own: Arc::new(Mutex::new(Own::read())),
        })
    }

    /// Why a destination is refused whatever a policy says, if it is and the operator made no exception.
    pub(super) fn refused(&self, to: Destination) -> Option<&'static str> {
        // An address of loopback itself is no way out of a sandbox, and its other spelling is what exceptions open.
        if to.asked.ip() == to.real.ip() && to.asked.ip().is_loopback() {
            return special_addresses::refused(to.asked.ip());
        }
        let why = special_addresses::refused(to.asked.ip())
            .or_else(|| self.is_own(to).then_some("the host's own address"))?;
        let excepted = self.except.iter().any(|rule| rule.covers(to.real));
        (!excepted).then_some(why)
    }

    /// The addresses that the operator opened: exceptions, and those of names that are answered here.
    pub fn opened(&self) -> Vec<AddressRule> {
        let fixed = self.hosts.values().flatten();
        let fixed = fixed.map(|ip| AddressRule { net: (*ip).into(), ports: Vec::new() });
        self.except.iter().cloned().chain(fixed).collect()
    }

    /// The address that a sandbox gets for an address that a name resolved to; `None` if it may not
    /// have it.
    pub(super) fn heard(&self, ip: IpAddr) -> Option<IpAddr> {
        let excepted = self.except.iter().any(|rule| rule.net.contains(&ip));
        if !excepted && (special_addresses::inside(ip).is_some() || self.is_own(at(ip))) {
            return None;
        }
        if ip.is_loopback() { special_addresses::alias(ip) } else { Some(ip) }
    }

    /// The addresses that a sandbox gets for a name that is answered here; `None` if it is not.
    pub(super) fn fixed(&self, name: &str) -> Option<Vec<IpAddr>> {
        if name == HOST_NAME {
            return Some(vec![HOST_V4.into()]);
        }
        // The operator wrote these, so that a private address among them is no surprise.
        let spoken = |ip: &IpAddr| {
            let spelled = if ip.is_loopback() { special_addresses::alias(*ip)? } else { *ip };
            let open = self.except.iter().any(|rule| rule.net.contains(ip));
            (open || self.refused(at(spelled)).is_none()).then_some(spelled)
        };
        self.hosts.get(name).map(|ips| ips.iter().filter_map(spoken).collect())
    }

    /// The places where a host is, as a sandbox would write them. `host` may be an address.
    pub(super) async fn places(&self, host: &str, port: u16) -> io::Result<Vec<Destination>> {
        let destination = |ip: IpAddr| Destination::new(SocketAddr::new(ip, port));
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if let Ok(ip) = bare.parse::<IpAddr>() {
            return Ok(vec![destination(special_addresses::alias(ip).unwrap_or(ip))]);
        }
        let name = host.trim_end_matches('.').to_ascii_lowercase();
        if let Some(fixed) = self.fixed(&name) {
            return Ok(fixed.into_iter().map(destination).collect());
        }
        let absolute = Name::from_ascii(format!("{name}."))
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "this is no host name"))?;
        let resolver = self.resolver();
        let (four, six) = tokio::join!(
            lookup(&resolver, absolute.clone(), RecordType::A),
            lookup(&resolver, absolute, RecordType::AAAA)
        );
        let found = four.iter().chain(&six).filter_map(|ip| self.heard(*ip));
        Ok(found.map(destination).collect())
    }

    /// The addresses of a host, as the daemon dials them. `host` may be an address, without brackets.
    pub(super) async fn addresses_of(&self, host: &str) -> io::Result<Vec<IpAddr>> {
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(vec![ip]);
        }
        let name = host.trim_end_matches('.').to_ascii_lowercase();
        if let Some(fixed) = self.hosts.get(&name) {
            return Ok(fixed.clone());
        }
        let absolute = Name::from_ascii(format!("{name}."))
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "this is no host name"))?;
        let resolver = self.resolver();
        let (mut four, six) = tokio::join!(
            lookup(&resolver, absolute.clone(), RecordType::A),
            lookup(&resolver, absolute, RecordType::AAAA)
        );
        four.extend(six);
        Ok(four)
    }

    /// Connects to a host that a rule of the operator's or the policy's own named, at the first of its addresses that
    /// is not refused, that `may` has nothing against and that answers.
    pub(super) async fn connect(
        &self,
        host: &str,
        port: u16,
        may: impl Fn(Destination) -> Result<(), String> + Send,
    ) -> io::Result<TcpStream> {
        let denied = |rule: String| io::Error::new(io::ErrorKind::PermissionDenied, rule);
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for destination in self.places(host, port).await? {
            let refused = self.refused(destination).map(|why| format!("always refused: {why}"));
            if let Some(rule) = refused.or_else(|| may(destination).err()) {
                last = denied(rule);
                continue;
            }
            match self.dial(destination.real).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Connects to an address, whatever it is.
    pub(super) async fn dial(&self, to: SocketAddr) -> io::Result<TcpStream> {
        let stream = tokio::time::timeout(DIAL_WITHIN, TcpStream::connect(to))
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "nobody answered"))??;
        stream.set_nodelay(true)?;
        // A peer that vanished without closing would otherwise be waited for without end.
        let keepalive = TcpKeepalive::new().with_time(ASK_AFTER).with_interval(ASK_AFTER);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        Ok(stream)
    }

    /// What TLS trusts outward: the host's authorities and the operator's.
    pub(super) fn tls(&self) -> Arc<ClientConfig> {
        let make = || {
            let mut roots = RootCertStore::empty();
            let native = rustls_native_certs::load_native_certs();
            for error in native.errors {
                tracing::warn!(%error, "some of the host's certificates cannot be read");
            }
            roots.add_parsable_certificates(native.certs);
            roots.add_parsable_certificates(self.extra.clone());
            let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
            let config = ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .expect("this provider has these versions");
            Arc::new(config.with_root_certificates(roots).with_no_client_auth())
        };
        Arc::clone(self.tls.get_or_init(make))
    }

    /// The resolver in force.
    pub(super) fn resolver(&self) -> TokioResolver {
        let mut resolver = self.resolver.lock();
        if self.resolvers.is_empty() && resolver.looked.elapsed() > FRESH {
            resolver.looked = Instant::now();
            if changed(HOST_RESOLVERS) != resolver.written {
                *resolver = Resolver::new(&[]);
            }
        }
        resolver.resolver.clone()
    }

    pub(super) fn is_own(&self, to: Destination) -> bool {
        let mut own = self.own.lock();
        if own.looked.elapsed() > FRESH {
            // Called for every packet that begins something: it must not wait for files.
            own.looked = Instant::now();
            let shared = Arc::clone(&self.own);
            match Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn_blocking(move || {
                    let read = Own::read();
                    *shared.lock() = read;
                })),
                Err(_) => *own = Own::read(),
            }
        }
        to.disguises().any(|form| own.nets.iter().any(|net| net.contains(&form.ip())))
    }
}

fn at(ip: IpAddr) -> Destination {
    Destination::new(SocketAddr::new(ip, 0))
}

fn certificates(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let bad = |reason: String| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("{}: {reason}", path.display()))
    };
    let found = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| bad(error.to_string()))?;
    if found.is_empty() {
        return Err(bad("holds no certificate".to_owned()));
    }
    Ok(found)
}

/// The addresses of one kind that a name has; none if the lookup finds none.
async fn lookup(resolver: &TokioResolver, name: Name, kind: RecordType) -> Vec<IpAddr> {
    let answer = tokio::time::timeout(RESOLVE_WITHIN, resolver.lookup(name, kind)).await;
    let Ok(Ok(answer)) = answer else { return Vec::new() };
    let records = answer.answers().iter();
    records
        .filter_map(|record| match &record.data {
            RData::A(ip) => Some(IpAddr::V4(ip.0)),
            RData::AAAA(ip) => Some(IpAddr::V6(ip.0)),
            _ => None,
        })
        .collect()
}

const HOST_RESOLVERS: &str = "/etc/resolv.conf";

/// A resolver, and the state of the host's file that it was made from.
struct Resolver {
    resolver: TokioResolver,
    written: Option<SystemTime>,
    looked: Instant,
}

impl Resolver {
    fn new(servers: &[SocketAddr]) -> Self {
        let written = changed(HOST_RESOLVERS);
        let (config, system) = if servers.is_empty() {
            read_system_conf().unwrap_or_else(|error| {
                tracing::warn!(%error, "the host has no name servers; sandboxes resolve no names");
                (ResolverConfig::default(), ResolverOpts::default())
            })
        } else {
            let servers = servers.iter().map(server).collect();
            (ResolverConfig::from_name_servers(servers), ResolverOpts::default())
        };
        let mut builder =
            TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
        let options = builder.options_mut();
        *options = system;
        // What names mean on the host itself is not what they mean in a sandbox.
        options.use_hosts_file = ResolveHosts::Never;
        options.timeout = options.timeout.clamp(Duration::from_secs(1), Duration::from_secs(5));
        options.attempts = options.attempts.clamp(1, 2);
        options.cache_size = 8192;
        options.positive_max_ttl = Some(Duration::from_secs(3600));
        options.negative_max_ttl = Some(Duration::from_secs(60));
        options.try_tcp_on_error = true;
        options.max_active_requests = 1024;
        let resolver = builder.build().expect("a resolver without TLS needs nothing that can fail");
        Self { resolver, written, looked: Instant::now() }
    }
}

fn server(at: &SocketAddr) -> NameServerConfig {
    let connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()].map(|mut connection| {
        connection.port = at.port();
        connection
    });
    NameServerConfig::new(at.ip(), true, connections.into())
}

fn changed(path: &str) -> Option<SystemTime> {
    fs::metadata(path).and_then(|file| file.modified()).ok()
}

/// The host's own addresses.
struct Own {
    nets: Vec<IpNet>,
    looked: Instant,
}

impl Own {
    fn read() -> Self {
        let text = |path| fs::read_to_string(path).unwrap_or_default();
        let mut nets = own_v4(&text("/proc/net/fib_trie"));
        nets.extend(own_v6(&text("/proc/net/if_inet6")));
        Self { nets, looked: Instant::now() }
    }
}

/// Local addresses of a routing trie: an address on one line, `/32 host LOCAL` on one after it.
fn own_v4(trie: &str) -> Vec<IpNet> {
    let mut nets = Vec::new();
    let mut address = None;
    for line in trie.lines().map(str::trim) {
        if let Some(leaf) = line.strip_prefix("|-- ") {
            address = Some(leaf);
        } else if let (Some(leaf), Some(length)) = (address, line.strip_suffix(" host LOCAL"))
            && let Ok(net) = format!("{leaf}{length}").parse::<IpNet>()
            && !nets.contains(&net)
        {
            nets.push(net);
        }
    }
    nets
}

fn own_v6(table: &str) -> Vec<IpNet> {
    let address = |line: &str| {
        let bits = u128::from_str_radix(line.split_whitespace().next()?, 16).ok()?;
        Some(IpNet::from(IpAddr::V6(Ipv6Addr::from(bits))))
    };
    table.lines().filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::IpAddr;
    use std::time::{Duration, Instant};

    use super::{AddressRule, Own, Upstream, UpstreamSettings, own_v4, own_v6};
    use crate::net::special_addresses::Destination;

    #[test]
    fn the_hosts_own_addresses_are_found() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     \
            +-- 203.0.113.0/24 2 0 2\n        |-- 203.0.113.7\n           /32 host LOCAL\n        \
            |-- 203.0.113.255\n           /32 link BROADCAST\nLocal:\n        |-- 203.0.113.7\n           \
            /32 host LOCAL\n        |-- 198.51.100.0\n           /24 link UNICAST\n           /28 host LOCAL\n";
        assert_eq!(
            own_v4(trie),
            ["203.0.113.7/32".parse().unwrap(), "198.51.100.0/28".parse().unwrap()]
        );
        let table = "fd000000000000000000000000000002 04 40 00 82     eth0\n\nnonsense\n";
        assert_eq!(own_v6(table), ["fd00::2/128".parse().unwrap()]);
    }

    #[test]
    fn the_hosts_own_addresses_are_refused_unless_excepted() {
        let loopback = "127.0.0.1".parse::<IpAddr>().unwrap();
        assert!(Own::read().nets.iter().any(|net| net.contains(&loopback)));
        let own = "203.0.113.7".parse::<IpAddr>().unwrap();
        let destination = |port| Destination::new((own, port).into());
        let on_this_host = |except: Vec<AddressRule>| {
            let outside = Upstream::new(UpstreamSettings { except, ..Default::default() }).unwrap();
            let looked = Instant::now() + Duration::from_secs(3600);
            *outside.own.lock() = Own { nets: vec![own.into()], looked };
            outside
        };
        let outside = on_this_host(Vec::new());
        assert_eq!(outside.refused(destination(80)), Some("the host's own address"));
        let translated = Destination::new("[64:ff9b::203.0.113.7]:80".parse().unwrap());
        assert_eq!(outside.refused(translated), Some("the host's own address"));
        assert_eq!(outside.heard(own), None);
        let outside = on_this_host(vec!["203.0.113.7:80".parse().unwrap()]);
        assert_eq!(outside.refused(destination(80)), None);
        assert_eq!(outside.refused(destination(81)), Some("the host's own address"));
        assert_eq!(outside.heard(own), Some(own));
    }

    #[tokio::test]
    async fn the_list_of_own_addresses_is_refreshed_aside() {
        let outside = Upstream::new(UpstreamSettings::default()).unwrap();
        let gone = "203.0.113.7".parse::<IpAddr>().unwrap();
        let looked = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
        *outside.own.lock() = Own { nets: vec![gone.into()], looked };
        let destination = Destination::new((gone, 80).into());
        assert!(outside.refused(destination).is_some(), "the old list was not asked");
        for _ in 0..500 {
            if outside.refused(destination).is_none() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the list is never read again");
    }

    #[tokio::test]
    async fn who_is_gone_without_a_word_is_noticed() {
        let outside = Upstream::new(UpstreamSettings::default()).unwrap();
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = outside.dial(server.local_addr().unwrap()).await.unwrap();
        assert!(socket2::SockRef::from(&stream).keepalive().unwrap());
    }

    #[test]
    fn a_file_of_certificates_must_hold_some() {
        let with = |ca| Upstream::new(UpstreamSettings { ca: Some(ca), ..Default::default() });
        let error = with("/nowhere/ca.pem".into()).unwrap_err();
        assert!(error.to_string().contains("/nowhere/ca.pem"), "{error}");
        let mut file = tempfile::NamedTempFile::new().unwrap();
        writeln!(file, "nothing of the kind").unwrap();
        assert!(with(file.path().into()).unwrap_err().to_string().contains("no certificate"));
        let authority = crate::net::Authority::generate("test").unwrap();
        write!(file, "{}", authority.certificate()).unwrap();
        with(file.path().into()).unwrap().tls();
    }
}
