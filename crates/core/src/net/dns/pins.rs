//! Remembers for which names an address was returned.
//!
//! A pin outlives by far the time to live of the answer, because programs remember longer than
//! that; and it is renewed whenever it is used. Their number is bounded, and the ones that end
//! first make room.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

const LASTS: Duration = Duration::from_secs(3600);
const ADDRESSES: usize = 4096;
const NAMES: usize = 128;

#[derive(Debug, Default)]
pub(super) struct Pins {
    addresses: HashMap<IpAddr, Vec<Pin>>,
}

#[derive(Debug)]
struct Pin {
    name: String,
    until: Instant,
}

impl Pins {
    /// An address is given out for a name.
    pub(super) fn give(&mut self, ip: IpAddr, name: &str, now: Instant) {
        if !self.addresses.contains_key(&ip) && self.addresses.len() >= ADDRESSES {
            self.make_room(now);
        }
        let until = now + LASTS;
        let pins = self.addresses.entry(ip).or_default();
        pins.retain(|pin| pin.name != name && pin.until > now);
        if pins.len() >= NAMES {
            pins.remove(0);
        }
        // The latest is last.
        pins.push(Pin { name: name.to_owned(), until });
    }

    /// Whether an address was given out for a name; if so, it stays so.
    pub(super) fn holds(&mut self, ip: IpAddr, name: &str, now: Instant) -> bool {
        let pins = self.addresses.get_mut(&ip).map_or(&mut [][..], Vec::as_mut_slice);
        let pin = pins.iter_mut().find(|pin| pin.name == name && pin.until > now);
        pin.map(|pin| pin.until = now + LASTS).is_some()
    }

    /// The names that an address was given out for, the latest first.
    pub(super) fn names(&self, ip: IpAddr, now: Instant) -> Vec<String> {
        let pins = self.addresses.get(&ip).map_or(&[][..], Vec::as_slice);
        pins.iter().rev().filter(|pin| pin.until > now).map(|pin| pin.name.clone()).collect()
    }

    fn make_room(&mut self, now: Instant) {
        self.addresses.retain(|_, pins| pins.iter().any(|pin| pin.until > now));
        if self.addresses.len() < ADDRESSES {
            return;
        }
        // An eighth at once, so that a flood of names does not sort them all each time.
        let last = |pins: &[Pin]| pins.iter().map(|pin| pin.until).max();
        let mut ends: Vec<_> = self.addresses.values().filter_map(|pins| last(pins)).collect();
        ends.sort_unstable();
        let limit = ends[ends.len() / 8];
        self.addresses.retain(|_, pins| last(pins).is_some_and(|end| end > limit));
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};
    use std::time::{Duration, Instant};

    use super::{ADDRESSES, LASTS, NAMES, Pins};

    fn ip(number: u32) -> IpAddr {
        Ipv4Addr::from(number).into()
    }

    #[test]
    fn a_pin_lasts_and_is_renewed_by_use() {
        let mut pins = Pins::default();
        let start = Instant::now();
        pins.give(ip(1), "a.example", start);
        pins.give(ip(1), "b.example", start);
        assert_eq!(pins.names(ip(1), start), ["b.example", "a.example"]);
        assert!(pins.holds(ip(1), "a.example", start + LASTS / 2));
        assert!(!pins.holds(ip(1), "c.example", start));
        assert!(!pins.holds(ip(2), "a.example", start));
        let later = start + LASTS + Duration::from_secs(1);
        assert!(pins.holds(ip(1), "a.example", later));
        assert!(!pins.holds(ip(1), "b.example", later));
        assert_eq!(pins.names(ip(1), later), ["a.example"]);
    }

    #[test]
    fn pins_are_bounded_and_the_oldest_go_first() {
        let mut pins = Pins::default();
        let start = Instant::now();
        let count = u32::try_from(ADDRESSES).unwrap() * 3;
        for number in 0..count {
            pins.give(ip(number), "a.example", start + Duration::from_millis(number.into()));
            assert!(pins.addresses.len() <= ADDRESSES);
        }
        let now = start + Duration::from_millis(count.into());
        assert!(pins.holds(ip(count - 1), "a.example", now));
        assert!(!pins.holds(ip(0), "a.example", now));
        for number in 0..1000 {
            pins.give(ip(0), &format!("{number}.example"), now);
        }
        assert_eq!(pins.names(ip(0), now).len(), NAMES);
        assert!(pins.holds(ip(0), "999.example", now));
    }
}
