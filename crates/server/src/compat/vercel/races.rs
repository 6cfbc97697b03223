//! Callers who want the same new sandbox at the same time.
//!
//! Their `getOrCreate` is two requests: a get, and a create when that found nothing. Of several callers
//! who do so at once all but one would be told that the name is taken, and fail. A create of a name
//! that *is* taken is a mistake and must say so; so the two have to be told apart. A caller lost a race
//! when its create
//!
//! - came while another one of the same name and the same wishes was under way,
//! - repeats one whose caller was cut off before it had the answer (their clients ask again by
//!   themselves when a connection breaks), or
//! - follows, closely, a get that found nothing *before* the sandbox was made. Each such get excuses one
//!   create.
//!
//! The loser waits and is handed the sandbox that the winner made.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sandkeep_core::model::{Name, Timestamp, now};

/// How long after a get its create may come.
const AFTER_GET: Duration = Duration::from_secs(2);
/// How long after its caller was cut off a create may be asked for again.
const AGAIN: Duration = Duration::from_secs(30);
/// How many names are watched at the most.
const MOST: usize = 10_000;

type Place = (Name, Name);

/// Who is at it just now.
#[derive(Debug, Clone, Default)]
pub(crate) struct Races(Arc<Mutex<HashMap<Place, Runners>>>);

#[derive(Debug, Default)]
struct Runners {
    /// Gets that found nothing.
    misses: Vec<(Instant, Timestamp)>,
    /// Creates under way, by what they wish.
    creates: Vec<String>,
    /// Creates whose callers never heard the answer.
    unheard: Vec<(Instant, String)>,
}

impl Runners {
    /// Forgets what is too old to matter; whether anything is left.
    fn tidy(&mut self) -> bool {
        self.misses.retain(|(at, _)| at.elapsed() < AFTER_GET);
        self.unheard.retain(|(at, _)| at.elapsed() < AGAIN);
        !(self.misses.is_empty() && self.unheard.is_empty() && self.creates.is_empty())
    }
}

/// A create under way. It belongs to the work, which goes on when the caller leaves.
#[derive(Debug)]
pub(crate) struct Running {
    races: Races,
    place: Place,
    wishes: String,
}

/// The caller of a create, until it has the answer.
#[derive(Debug)]
pub(crate) struct Waiting {
    races: Races,
    place: Place,
    wishes: String,
    began: Instant,
    /// Another one of the same kind was under way when it came, or had not been heard.
    joined: bool,
    answered: bool,
}

impl Races {
    fn lock(&self) -> MutexGuard<'_, HashMap<Place, Runners>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A get found nothing.
    pub(crate) fn missed(&self, project: &Name, name: &Name) {
        let mut all = self.lock();
        if all.len() >= MOST {
            all.retain(|_, runners| runners.tidy());
        }
        if all.len() < MOST {
            let runners = all.entry((project.clone(), name.clone())).or_default();
            runners.tidy();
            runners.misses.truncate(1000);
            runners.misses.push((Instant::now(), now()));
        }
    }

    /// A create begins.
    pub(crate) fn begin(&self, project: &Name, name: &Name, wishes: &str) -> (Running, Waiting) {
        let place = (project.clone(), name.clone());
        let mut all = self.lock();
        let runners = all.entry(place.clone()).or_default();
        runners.tidy();
        let unheard = runners.unheard.iter().position(|(_, other)| other == wishes);
        if let Some(at) = unheard {
            runners.unheard.swap_remove(at);
        }
        let joined = unheard.is_some() || runners.creates.iter().any(|other| other == wishes);
        runners.creates.push(wishes.to_owned());
        drop(all);
        let (races, wishes) = (self.clone(), wishes.to_owned());
        let running =
            Running { races: races.clone(), place: place.clone(), wishes: wishes.clone() };
        let began = Instant::now();
        (running, Waiting { races, place, wishes, began, joined, answered: false })
    }
}

impl Waiting {
    /// The sandbox was made: the get before it is done with.
    pub(crate) fn won(&mut self) {
        self.answered = true;
        self.excuse(now());
    }

    /// The name is taken since `created`: whether that happened under this caller's eyes.
    pub(crate) fn lost(&mut self, created: Timestamp) -> bool {
        self.answered = true;
        self.excuse(created) || self.joined
    }

    /// Takes away one get, not long before this create, that found nothing before `created`.
    fn excuse(&self, created: Timestamp) -> bool {
        let mut all = self.races.lock();
        let Some(runners) = all.get_mut(&self.place) else { return false };
        let fits = |(at, when): &(Instant, Timestamp)| {
            self.began.saturating_duration_since(*at) < AFTER_GET && *when <= created
        };
        let found = runners.misses.iter().position(fits);
        if let Some(at) = found {
            runners.misses.remove(at);
        }
        found.is_some()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.answered {
            let mut all = self.races.lock();
            let runners = all.entry(self.place.clone()).or_default();
            runners.unheard.push((Instant::now(), std::mem::take(&mut self.wishes)));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut all = self.races.lock();
        let Some(runners) = all.get_mut(&self.place) else { return };
        if let Some(at) = runners.creates.iter().position(|wishes| *wishes == self.wishes) {
            runners.creates.swap_remove(at);
        }
        if !runners.tidy() {
            all.remove(&self.place);
        }
    }
}

#[cfg(test)]
mod tests {
    use sandkeep_core::model::{Name, now};

    use super::{Races, Waiting};

    fn names() -> (Name, Name) {
        ("p".parse().unwrap(), "n".parse().unwrap())
    }

    /// A create whose work is done at once.
    fn create(races: &Races, wishes: &str) -> Waiting {
        let (project, name) = names();
        races.begin(&project, &name, wishes).1
    }

    #[test]
    fn each_get_excuses_one_create() {
        let (project, name) = names();
        let races = Races::default();
        races.missed(&project, &name);
        races.missed(&project, &name);
        create(&races, "").won();
        let made = now();
        assert!(create(&races, "").lost(made));
        assert!(!create(&races, "").lost(made), "a plain mistake");
        // What was looked for after it was made, and deleted since, excuses nothing. Times are on
        // record in milliseconds.
        std::thread::sleep(std::time::Duration::from_millis(3));
        races.missed(&project, &name);
        assert!(!create(&races, "").lost(made));
    }

    #[test]
    fn creates_at_the_same_time_join_if_they_wish_the_same() {
        let (project, name) = names();
        let races = Races::default();
        let (running, mut first) = races.begin(&project, &name, "a");
        assert!(create(&races, "a").lost(now()));
        assert!(!create(&races, "b").lost(now()));
        first.won();
        drop(running);
        assert!(!create(&races, "a").lost(now()));
    }

    #[test]
    fn who_was_cut_off_may_ask_again_once() {
        let races = Races::default();
        drop(create(&races, "a"));
        assert!(!create(&races, "b").lost(now()), "somebody else");
        assert!(create(&races, "a").lost(now()));
        assert!(!create(&races, "a").lost(now()));
        assert!(races.lock().values().all(|runners| runners.creates.is_empty()));
    }
}
