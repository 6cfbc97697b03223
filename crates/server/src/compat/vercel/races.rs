//! Callers who want the same new sandbox at the same time.
//!
//! Their `getOrCreate` is two requests: a get, and a create when that found nothing. Of several callers
//! who do so at once all but one would be told that the name is taken, and fail. A create of a name
//! that *is* taken is a mistake and must say so; so the two have to be told apart. A caller lost a race
//! when its create
//!
//! - came while another one of the same name and the same wishes was under way, or
//! - follows a get that found nothing *before* the sandbox was made. Each such get excuses one create.
//!
//! The loser waits and is handed the sandbox that the winner made.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sandkeep_core::model::{Name, Timestamp, now};

/// How long after a get its create may come.
const WINDOW: Duration = Duration::from_secs(30);
/// How many names are watched at the most.
const MOST: usize = 10_000;

type Place = (Name, Name);

/// Who is at it just now.
#[derive(Debug, Default)]
pub(crate) struct Races(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// Gets that found nothing.
    misses: HashMap<Place, Vec<(Instant, Timestamp)>>,
    /// Creates under way, by what they wish.
    creates: HashMap<Place, Vec<String>>,
}

/// A create under way.
#[derive(Debug)]
pub(crate) struct Running<'a> {
    races: &'a Races,
    place: Place,
    wishes: String,
    /// Another one of the same kind was under way when it came.
    joined: bool,
}

impl Races {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A get found nothing.
    pub(crate) fn missed(&self, project: &Name, name: &Name) {
        let mut inner = self.lock();
        if inner.misses.len() >= MOST {
            inner.misses.retain(|_, seen| seen.iter().any(|(at, _)| at.elapsed() < WINDOW));
        }
        if inner.misses.len() < MOST {
            let seen = inner.misses.entry((project.clone(), name.clone())).or_default();
            seen.retain(|(at, _)| at.elapsed() < WINDOW);
            seen.truncate(1000);
            seen.push((Instant::now(), now()));
        }
    }

    /// A create begins.
    pub(crate) fn begin(&self, project: &Name, name: &Name, wishes: String) -> Running<'_> {
        let place = (project.clone(), name.clone());
        let mut inner = self.lock();
        let others = inner.creates.entry(place.clone()).or_default();
        let joined = others.contains(&wishes);
        others.push(wishes.clone());
        Running { races: self, place, wishes, joined }
    }
}

impl Running<'_> {
    /// The sandbox was made: the get before it is done with.
    pub(crate) fn won(&self) {
        self.excuse(now());
    }

    /// The name is taken since `created`: whether that happened under this caller's eyes.
    pub(crate) fn lost(&self, created: Timestamp) -> bool {
        self.excuse(created) || self.joined
    }

    /// Takes away one get that found nothing before `created`.
    fn excuse(&self, created: Timestamp) -> bool {
        let mut inner = self.races.lock();
        let Some(seen) = inner.misses.get_mut(&self.place) else { return false };
        let fits = |(at, when): &(Instant, Timestamp)| at.elapsed() < WINDOW && *when <= created;
        let found = seen.iter().position(fits);
        if let Some(at) = found {
            seen.remove(at);
        }
        if seen.is_empty() {
            inner.misses.remove(&self.place);
        }
        found.is_some()
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut inner = self.races.lock();
        if let Some(others) = inner.creates.get_mut(&self.place) {
            if let Some(at) = others.iter().position(|wishes| *wishes == self.wishes) {
                others.swap_remove(at);
            }
            if others.is_empty() {
                inner.creates.remove(&self.place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use sandkeep_core::model::{Name, now};

    use super::Races;

    #[test]
    fn each_get_excuses_one_create() {
        let (project, name): (Name, Name) = ("p".parse().unwrap(), "n".parse().unwrap());
        let races = Races::default();
        races.missed(&project, &name);
        races.missed(&project, &name);
        races.begin(&project, &name, String::new()).won();
        let made = now();
        assert!(races.begin(&project, &name, String::new()).lost(made));
        assert!(!races.begin(&project, &name, String::new()).lost(made), "a plain mistake");
        // What was looked for after it was made, and deleted since, excuses nothing. Times are on
        // record in milliseconds.
        std::thread::sleep(std::time::Duration::from_millis(3));
        races.missed(&project, &name);
        assert!(!races.begin(&project, &name, String::new()).lost(made));
    }

    #[test]
    fn creates_at_the_same_time_join_if_they_wish_the_same() {
        let (project, name): (Name, Name) = ("p".parse().unwrap(), "n".parse().unwrap());
        let races = Races::default();
        let first = races.begin(&project, &name, "a".to_owned());
        assert!(races.begin(&project, &name, "a".to_owned()).lost(now()));
        assert!(!races.begin(&project, &name, "b".to_owned()).lost(now()));
        drop(first);
        assert!(!races.begin(&project, &name, "a".to_owned()).lost(now()));
    }
}
