//! Stand-in addresses: given out instead of a host's own while the first contact with it is not
//! approved.
//!
//! Nothing outside learns a name before that: not even its name server. A connection to a stand-in
//! is held, and goes to the host once it may.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};

/// How many names have one at a time; the oldest loses it to the next.
const MOST: usize = 4096;
/// How many addresses there are. So one is given out again long after it was lost.
const ADDRESSES: u16 = 0x8000;

#[derive(Debug, Default)]
pub(super) struct StandIns {
    by_name: HashMap<String, Ipv4Addr>,
    by_address: HashMap<Ipv4Addr, String>,
    order: VecDeque<String>,
    next: u16,
}

impl StandIns {
    /// The address that stands for a name.
    pub(super) fn of(&mut self, name: &str) -> Ipv4Addr {
        if let Some(address) = self.by_name.get(name) {
            return *address;
        }
        if self.order.len() >= MOST
            && let Some(oldest) = self.order.pop_front()
            && let Some(address) = self.by_name.remove(&oldest)
        {
            self.by_address.remove(&address);
        }
        // In the unused half of the sandboxes' own network.
        let [high, low] = (0x8000 | self.next).to_be_bytes();
        let address = Ipv4Addr::new(100, 96, high, low);
        self.next = (self.next + 1) % ADDRESSES;
        self.by_name.insert(name.to_owned(), address);
        self.by_address.insert(address, name.to_owned());
        self.order.push_back(name.to_owned());
        address
    }

    /// The name that an address stands for.
    pub(super) fn name(&self, address: IpAddr) -> Option<String> {
        match address {
            IpAddr::V4(address) => self.by_address.get(&address).cloned(),
            IpAddr::V6(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::{MOST, StandIns};

    #[test]
    fn names_keep_theirs_until_there_are_too_many() {
        let mut all = StandIns::default();
        let first = all.of("a.test");
        assert_eq!((first.octets()[0], first.octets()[1]), (100, 96));
        assert!(first.octets()[2] >= 0x80);
        assert_eq!(all.of("a.test"), first);
        assert_eq!(all.name(IpAddr::V4(first)).as_deref(), Some("a.test"));
        for number in 0..MOST {
            all.of(&format!("{number}.test"));
        }
        assert_eq!(all.name(IpAddr::V4(first)), None);
        assert_ne!(all.of("a.test"), first, "whoever has the old one must not get another host");
        assert_eq!(all.by_name.len(), MOST);
        assert_eq!(all.by_address.len(), MOST);
    }
}
