//! Special addresses: those that are refused whatever a policy says (metadata services, loopback, link-local, ...), and private
//! networks, which names must not resolve to. Pure; the operator's exceptions and the host's own addresses are in `upstream`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;

/// Where a sandbox wants to go, and where that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Destination {
    /// As the sandbox wrote it.
    pub(super) asked: SocketAddr,
    /// As the host dials it.
    pub(super) real: SocketAddr,
}

impl Destination {
    /// The destination that a sandbox means by an address.
    pub(super) fn new(asked: SocketAddr) -> Self {
        let ip = match asked.ip() {
            IpAddr::V4(ip) => match ip.octets() {
                [100, 97, b, c] => IpAddr::V4(Ipv4Addr::new(127, 0, b, c)),
                _ => IpAddr::V4(ip),
            },
            IpAddr::V6(LOOPBACK_V6) => IpAddr::V6(Ipv6Addr::LOCALHOST),
            IpAddr::V6(ip) => IpAddr::V6(ip),
        };
        Self { asked, real: SocketAddr::new(ip, asked.port()) }
    }

    /// The forms in which a rule that allows may speak of it.
    pub(super) fn forms(self) -> impl Iterator<Item = SocketAddr> {
        [self.asked, self.real].into_iter()
    }

    /// The forms in which a rule that refuses may speak of it: also as the IPv4 address that it carries.
    pub(super) fn disguises(self) -> impl Iterator<Item = SocketAddr> {
        let carried =
            carried(self.asked.ip()).map(|ip| SocketAddr::new(ip.into(), self.asked.port()));
        self.forms().chain(carried)
    }
}

/// The host's `::1`, as a sandbox writes it.
const LOOPBACK_V6: Ipv6Addr = Ipv6Addr::new(0xfd73, 0x616e, 0x646b, 1, 0, 0, 0, 1);

/// The host's `127.0.0.1`, as a sandbox writes it.
pub(super) const HOST_V4: Ipv4Addr = Ipv4Addr::new(100, 97, 0, 1);

/// How a sandbox writes an address of the host's loopback, where there is a way to.
pub(super) fn alias(ip: IpAddr) -> Option<IpAddr> {
    match ip {
        IpAddr::V4(ip) => match ip.octets() {
            [127, 0, b, c] => Some(Ipv4Addr::new(100, 97, b, c).into()),
            _ => None,
        },
        IpAddr::V6(ip) => (ip == Ipv6Addr::LOCALHOST).then_some(LOOPBACK_V6.into()),
    }
}

/// Why an address is refused whatever the policy says, if it is.
pub(super) fn refused(ip: IpAddr) -> Option<&'static str> {
    match ip {
        IpAddr::V4(ip) => refused_v4(ip),
        IpAddr::V6(ip) => refused_v6(ip),
    }
}

/// Why no answer to a lookup may hold an address, if so: it is refused anyway, or leads to a private network.
pub(super) fn inside(ip: IpAddr) -> Option<&'static str> {
    if let Some(why) = refused(ip) {
        return Some(why);
    }
    let private = match ip {
        IpAddr::V4(ip) => private_v4(ip),
        IpAddr::V6(ip) => {
            let [a, b, ..] = ip.segments();
            let local = a & 0xfe00 == 0xfc00 || a & 0xffc0 == 0xfec0;
            // Teredo, and what is discarded by definition.
            let special =
                (a, b) == (0x2001, 0) || (a == 0x100 && ip.segments()[..4] == [0x100, 0, 0, 0]);
            local || special || carried(ip.into()).is_some_and(private_v4)
        }
    };
    private.then_some(PRIVATE)
}

/// Why an address is never valid, whatever the operator allows: it is a metadata service, or no
/// receiver has it.
pub(super) fn never_received(ip: IpAddr) -> Option<&'static str> {
    match refused(ip)? {
        "the host's loopback" | "link-local" if carried(ip).is_none() => None,
        why => Some(why),
    }
}

/// Whether an address leads to a private network, which is closed unless a policy or the operator opens it.
pub(super) fn is_private(ip: IpAddr) -> bool {
    inside(ip) == Some(PRIVATE)
}

/// Whether all of some addresses do: a rule for all the world does not mean the networks around the host.
pub(super) fn is_private_net(net: &IpNet) -> bool {
    is_private(net.network()) && is_private(net.broadcast())
}

const PRIVATE: &str = "a private network";

const METADATA_V4: [Ipv4Addr; 7] = [
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(169, 254, 170, 2),
    Ipv4Addr::new(169, 254, 170, 23),
    Ipv4Addr::new(169, 254, 42, 42),
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(192, 0, 0, 192),
];

const METADATA_V6: [Ipv6Addr; 4] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23),
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42),
];

fn refused_v4(ip: Ipv4Addr) -> Option<&'static str> {
    if METADATA_V4.contains(&ip) {
        return Some("metadata");
    }
    match ip.octets() {
        [0, ..] => Some("unspecified"),
        [127, ..] => Some("the host's loopback"),
        [169, 254, ..] => Some("link-local"),
        [224..=239, ..] => Some("multicast"),
        [240..=255, ..] => Some("broadcast or reserved"),
        [100, 96, ..] => Some("other sandboxes"),
        [100, 97, ..] => Some("the host's loopback"),
        _ => None,
    }
}

fn refused_v6(ip: Ipv6Addr) -> Option<&'static str> {
    if METADATA_V6.contains(&ip) {
        return Some("metadata");
    }
    let segments = ip.segments();
    match segments {
        [0, 0, 0, 0, 0, 0, 0, 0] => Some("unspecified"),
        [0, 0, 0, 0, 0, 0, 0, 1] => Some("the host's loopback"),
        // Mapped, translated and compatible: a host takes these for IPv4, no network carries them.
        [0, 0, 0, 0, 0, 0 | 0xffff, ..] | [0, 0, 0, 0, 0xffff, 0, ..] => Some("IPv4 inside IPv6"),
        [0x64, 0xff9b, 1, ..] => Some("IPv4 inside IPv6"),
        [0xfe80..=0xfebf, ..] => Some("link-local"),
        [0xff00..=0xffff, ..] => Some("multicast"),
        [0xfd73, 0x616e, 0x646b, 1, ..] => Some("the host's loopback"),
        [0xfd73, 0x616e, 0x646b, ..] => Some("other sandboxes"),
        _ => carried(ip.into()).and_then(refused_v4),
    }
}

fn private_v4(ip: Ipv4Addr) -> bool {
    matches!(
        ip.octets(),
        [10, ..]
            | [172, 16..=31, ..]
            | [192, 168, ..]
            | [100, 64..=127, ..]
            | [192, 0, 0, _]
            | [198, 18..=19, ..]
    )
}

/// The IPv4 address that an IPv6 one stands for: mapped, behind NAT64, or by 6to4.
fn carried(ip: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(ip) = ip else { return None };
    let of = |high: u16, low: u16| Ipv4Addr::from(u32::from(high) << 16 | u32::from(low));
    match ip.segments() {
        [0, 0, 0, 0, 0, 0xffff, high, low]
        | [0, 0, 0, 0, 0xffff, 0, high, low]
        | [0x64, 0xff9b, 0, 0, 0, 0, high, low]
        | [0x2002, high, low, ..] => Some(of(high, low)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::{Destination, alias, inside, refused};

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap_or_else(|_| panic!("{text}"))
    }

    #[test]
    fn some_addresses_are_refused_in_every_form() {
        for (text, why) in [
            ("169.254.169.254", "metadata"),
            ("100.100.100.200", "metadata"),
            ("168.63.129.16", "metadata"),
            ("192.0.0.192", "metadata"),
            ("fd00:ec2::254", "metadata"),
            ("fd20:ce::254", "metadata"),
            ("169.254.1.1", "link-local"),
            ("fe80::1", "link-local"),
            ("127.0.0.1", "the host's loopback"),
            ("127.9.9.9", "the host's loopback"),
            ("::1", "the host's loopback"),
            ("100.97.0.1", "the host's loopback"),
            ("fd73:616e:646b:1::1", "the host's loopback"),
            ("100.96.0.2", "other sandboxes"),
            ("100.96.77.1", "other sandboxes"),
            ("fd73:616e:646b::2", "other sandboxes"),
            ("0.0.0.0", "unspecified"),
            ("0.1.2.3", "unspecified"),
            ("::", "unspecified"),
            ("224.0.0.251", "multicast"),
            ("ff02::1", "multicast"),
            ("255.255.255.255", "broadcast or reserved"),
            ("240.0.0.1", "broadcast or reserved"),
            ("::ffff:198.51.100.1", "IPv4 inside IPv6"),
            ("::198.51.100.1", "IPv4 inside IPv6"),
            ("::ffff:0:198.51.100.1", "IPv4 inside IPv6"),
            ("64:ff9b:1::1", "IPv4 inside IPv6"),
            ("64:ff9b::169.254.169.254", "metadata"),
            ("64:ff9b::127.0.0.1", "the host's loopback"),
            ("2002:a9fe:a9fe::1", "metadata"),
            ("2002:7f00:1::", "the host's loopback"),
        ] {
            assert_eq!(refused(ip(text)), Some(why), "{text}");
            assert!(inside(ip(text)).is_some(), "{text}");
        }
    }

    #[test]
    fn names_do_not_lead_to_private_networks() {
        for text in [
            "10.0.0.1",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "100.64.0.1",
            "198.18.0.1",
            "fc00::1",
            "fdab::1",
            "fec0::1",
            "64:ff9b::10.0.0.1",
            "2002:c0a8:101::1",
            "2001:0:1::1",
            "100::1",
        ] {
            assert_eq!(inside(ip(text)), Some("a private network"), "{text}");
            assert_eq!(refused(ip(text)), None, "{text}");
        }
        for text in [
            "192.0.2.1",
            "198.51.100.1",
            "203.0.113.1",
            "8.8.8.8",
            "172.32.0.1",
            "100.128.0.1",
            "2606:4700::1",
            "64:ff9b::8.8.8.8",
        ] {
            assert_eq!(inside(ip(text)), None, "{text}");
        }
    }

    #[test]
    fn the_hosts_loopback_has_another_spelling() {
        for (asked, real) in [
            ("100.97.0.1:80", "127.0.0.1:80"),
            ("100.97.3.4:80", "127.0.3.4:80"),
            ("[fd73:616e:646b:1::1]:80", "[::1]:80"),
            ("198.51.100.1:80", "198.51.100.1:80"),
        ] {
            let destination = Destination::new(asked.parse().unwrap());
            assert_eq!(destination.real, real.parse().unwrap());
            if destination.real.ip().is_loopback() {
                assert_eq!(alias(destination.real.ip()), Some(destination.asked.ip()));
            }
        }
        assert_eq!(alias(ip("127.1.0.1")), None);
    }
}
