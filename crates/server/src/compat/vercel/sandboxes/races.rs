//! Callers that want to create the same sandbox at the same time.
//!
//! Their `getOrCreate` is two requests: a get, and a create when that found nothing. A client whose
//! create succeeds takes itself for the creator and runs its `onCreate`; a client whose create is
//! refused fails. No answer to a create makes a client fetch the sandbox instead. So it is decided
//! at the get:
//!
//! - The first get that finds nothing is answered so, and its caller is expected to create ([`LEASE`]).
//! - Every other get waits, until the sandbox exists and can be returned, or until it is clear that
//!   nobody creates it: then one of the waiting callers is the next to get "not found".
//!
//! So of twenty callers at once one creates and runs `onCreate`, and nineteen find the sandbox. A
//! client that only checks whether a sandbox exists may wait for as long as another one is expected
//! to create it.
//!
//! A create of a name that is taken is refused, as their service does, unless it
//!
//! - repeats one whose caller was cut off before it had the answer (their clients ask again by
//!   themselves when a connection breaks), or
//! - came while another one of the same name and the same wishes was under way: that, too, is how a
//!   repeated request looks from here.
//!
//! Such a caller waits and is handed the sandbox.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use sandkeep_core::model::Name;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

/// How long after a get that found nothing its create may come.
const LEASE: Duration = Duration::from_secs(2);
/// How many leases a get waits for while others are expected to create.
const TURNS: u32 = 5;
/// How long a get waits for a create that is under way: the image may have to be made first.
const WAIT_FOR_CREATE: Duration = Duration::from_secs(120);
/// How long after its caller was cut off a create may be asked for again.
const AGAIN: Duration = Duration::from_secs(30);
/// How many creates without a delivered answer are remembered for one name; the oldest is forgotten
/// first.
const MOST_UNHEARD: usize = 16;
/// How many names are watched at most: of one project, so that none takes the place of others, and
/// of all.
const MOST_PER_PROJECT: usize = 1_000;
const MOST: usize = 100_000;

type SandboxKey = (Name, Name);

/// By project, and there by name.
type Watched = HashMap<Name, HashMap<Name, Runners>>;

/// Who is at it just now.
#[derive(Debug, Clone)]
pub(crate) struct Races {
    all: Arc<Mutex<Watched>>,
    lease: Duration,
}

impl Default for Races {
    fn default() -> Self {
        Self { all: Arc::default(), lease: LEASE }
    }
}

#[derive(Debug, Default)]
struct Runners {
    /// Until when somebody who found nothing is expected to create.
    expected: Option<Instant>,
    /// Creates under way, by what they wish.
    creates: Vec<String>,
    /// Creates whose callers never got the answer.
    unheard: Vec<(Instant, String)>,
    /// Wakes the waiting callers to look again.
    changed: watch::Sender<()>,
}

impl Runners {
    /// Forgets what is too old to matter; whether anything is left.
    fn tidy(&mut self) -> bool {
        let now = Instant::now();
        self.expected = self.expected.filter(|until| *until > now);
        self.unheard.retain(|(at, _)| at.elapsed() < AGAIN);
        self.expected.is_some() || !self.unheard.is_empty() || !self.creates.is_empty()
    }
}

/// What a caller who found nothing is to do.
#[derive(Debug)]
pub(crate) enum Missed {
    /// It gets that answer, and may create.
    Tell,
    /// It waits for another caller's create, and looks again.
    Wait(Changed),
}

/// Something that will have changed when it is worth looking again.
#[derive(Debug)]
pub(crate) struct Changed {
    changed: watch::Receiver<()>,
    until: Instant,
}

impl Changed {
    /// Waits until it is worth looking again.
    pub(crate) async fn wait(mut self) {
        // Too late, or the other has gone: either way it is time to look.
        let _ = timeout_at(self.until, self.changed.changed()).await;
    }
}

/// A create in progress. It belongs to the work, which continues when the caller leaves.
#[derive(Debug)]
pub(crate) struct CreateInProgress {
    races: Races,
    place: SandboxKey,
    wishes: String,
}

/// The caller of a create, until it has the answer.
#[derive(Debug)]
pub(crate) struct CreateCaller {
    races: Races,
    place: SandboxKey,
    wishes: String,
    /// Another one of the same kind was in progress when it came, or had not delivered its answer.
    joined: bool,
    answered: bool,
}

impl Races {
    fn lock(&self) -> MutexGuard<'_, Watched> {
        self.all.lock()
    }

    /// A get that came at `since` found nothing.
    pub(crate) fn missed(&self, project: &Name, name: &Name, since: Instant) -> Missed {
        let mut all = self.lock();
        if !has_room(&mut all, project, name) {
            return Missed::Tell;
        }
        let runners = all.entry(project.clone()).or_default().entry(name.clone()).or_default();
        runners.tidy();
        let until = match runners.expected {
            _ if !runners.creates.is_empty() => since + WAIT_FOR_CREATE,
            Some(expected) => expected.min(since + self.lease * TURNS),
            None => since,
        };
        if until <= Instant::now() {
            runners.expected = Some(Instant::now() + self.lease);
            return Missed::Tell;
        }
        Missed::Wait(Changed { changed: runners.changed.subscribe(), until })
    }

    /// A create begins.
    pub(crate) fn begin(
        &self,
        project: &Name,
        name: &Name,
        wishes: &str,
    ) -> (CreateInProgress, CreateCaller) {
        let place = (project.clone(), name.clone());
        let mut all = self.lock();
        let runners = all.entry(project.clone()).or_default().entry(name.clone()).or_default();
        runners.tidy();
        runners.expected = None;
        let unheard = runners.unheard.iter().position(|(_, other)| other == wishes);
        if let Some(at) = unheard {
            runners.unheard.swap_remove(at);
        }
        let joined = unheard.is_some() || runners.creates.iter().any(|other| other == wishes);
        runners.creates.push(wishes.to_owned());
        // Those who wait for it to begin now wait for it to end.
        runners.changed.send_replace(());
        drop(all);
        let (races, wishes) = (self.clone(), wishes.to_owned());
        let running =
            CreateInProgress { races: races.clone(), place: place.clone(), wishes: wishes.clone() };
        (running, CreateCaller { races, place, wishes, joined, answered: false })
    }
}

impl CreateCaller {
    /// The caller has its answer, and will not ask again. Returns whether it may get an existing
    /// sandbox.
    pub(crate) fn answered(&mut self) -> bool {
        self.answered = true;
        self.joined
    }
}

impl Drop for CreateCaller {
    fn drop(&mut self) {
        if !self.answered {
            let mut all = self.races.lock();
            let (project, name) = &self.place;
            // More than may be watched are not: such a caller is refused when it asks again.
            if !has_room(&mut all, project, name) {
                return;
            }
            let runners = all.entry(project.clone()).or_default().entry(name.clone()).or_default();
            if runners.unheard.len() == MOST_UNHEARD {
                runners.unheard.remove(0);
            }
            runners.unheard.push((Instant::now(), std::mem::take(&mut self.wishes)));
        }
    }
}

impl Drop for CreateInProgress {
    fn drop(&mut self) {
        let mut all = self.races.lock();
        let (project, name) = &self.place;
        let Some(names) = all.get_mut(project) else { return };
        let Some(runners) = names.get_mut(name) else { return };
        if let Some(at) = runners.creates.iter().position(|wishes| *wishes == self.wishes) {
            runners.creates.swap_remove(at);
        }
        runners.changed.send_replace(());
        if !runners.tidy() {
            names.remove(name);
        }
        if names.is_empty() {
            all.remove(project);
        }
    }
}

/// Whether a name is watched or may be. What does not matter any more is forgotten where it takes the place of others.
fn has_room(all: &mut Watched, project: &Name, name: &Name) -> bool {
    let mine = all.get(project);
    if mine.is_some_and(|names| names.contains_key(name)) {
        return true;
    }
    if mine.is_some_and(|names| names.len() >= MOST_PER_PROJECT)
        && let Some(names) = all.get_mut(project)
    {
        names.retain(|_, runners| runners.tidy());
        if names.len() >= MOST_PER_PROJECT {
            return false;
        }
    }
    if all.values().map(HashMap::len).sum::<usize>() >= MOST {
        all.retain(|_, names| {
            names.retain(|_, runners| runners.tidy());
            !names.is_empty()
        });
        return all.values().map(HashMap::len).sum::<usize>() < MOST;
    }
    true
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sandkeep_core::model::Name;
    use tokio::time::Instant;

    use super::{CreateCaller, MOST_PER_PROJECT, Missed, Races, TURNS};

    const LEASE: Duration = Duration::from_millis(50);

    fn quick() -> Races {
        Races { lease: LEASE, ..Races::default() }
    }

    fn names() -> (Name, Name) {
        ("p".parse().unwrap(), "n".parse().unwrap())
    }

    /// A create whose work is done at once.
    fn create(races: &Races, wishes: &str) -> CreateCaller {
        let (project, name) = names();
        races.begin(&project, &name, wishes).1
    }

    fn look(races: &Races) -> Missed {
        let (project, name) = names();
        races.missed(&project, &name, Instant::now())
    }

    #[tokio::test]
    async fn one_is_told_that_there_is_nothing_and_the_others_wait_for_its_create() {
        let (project, name) = names();
        let races = quick();
        assert!(matches!(look(&races), Missed::Tell));
        let Missed::Wait(second) = look(&races) else { panic!("told too") };
        let (running, mut first) = races.begin(&project, &name, "a");
        second.wait().await;
        let Missed::Wait(second) = look(&races) else { panic!("told while it is made") };
        let before = Instant::now();
        let made = tokio::spawn(async move {
            // Longer than any caller is expected to take before it begins.
            tokio::time::sleep(LEASE * (TURNS + 2)).await;
            drop(running);
        });
        second.wait().await;
        assert!(before.elapsed() >= LEASE * (TURNS + 2), "a create may take its time");
        made.await.unwrap();
        assert!(!first.answered());
    }

    #[tokio::test]
    async fn who_only_looks_holds_the_others_up_for_a_while_only() {
        let (project, name) = names();
        let races = quick();
        assert!(matches!(look(&races), Missed::Tell));
        let since = Instant::now();
        let Missed::Wait(second) = races.missed(&project, &name, since) else { panic!("told too") };
        second.wait().await;
        assert!(matches!(races.missed(&project, &name, since), Missed::Tell), "the next in turn");
        // However many others are answered first, no caller waits without end.
        let since = Instant::now();
        let mut waited = 0;
        while let Missed::Wait(changed) = races.missed(&project, &name, since) {
            changed.wait().await;
            let _ = look(&races);
            waited += 1;
            assert!(waited < 20);
        }
    }

    #[tokio::test]
    async fn a_create_that_fails_lets_the_next_one_try() {
        let (project, name) = names();
        let races = Races::default();
        assert!(matches!(look(&races), Missed::Tell));
        let (running, mut first) = races.begin(&project, &name, "a");
        let Missed::Wait(second) = look(&races) else { panic!("told while it is made") };
        drop(running);
        first.answered();
        second.wait().await;
        assert!(matches!(look(&races), Missed::Tell));
    }

    #[test]
    fn creates_at_the_same_time_join_if_they_wish_the_same() {
        let (project, name) = names();
        let races = Races::default();
        let (running, mut first) = races.begin(&project, &name, "a");
        assert!(create(&races, "a").answered());
        assert!(!create(&races, "b").answered());
        first.answered();
        drop(running);
        assert!(!create(&races, "a").answered(), "a plain mistake");
    }

    #[test]
    fn who_was_cut_off_may_ask_again_once() {
        let races = Races::default();
        drop(create(&races, "a"));
        assert!(!create(&races, "b").answered(), "somebody else");
        assert!(create(&races, "a").answered());
        assert!(!create(&races, "a").answered());
        let all = races.lock();
        assert!(all.values().flatten().all(|(_, runners)| runners.creates.is_empty()));
    }

    #[test]
    fn a_project_does_not_take_the_places_of_others() {
        let races = Races::default();
        let (greedy, other): (Name, Name) = ("greedy".parse().unwrap(), "other".parse().unwrap());
        let name = |index: usize| format!("n{index}").parse::<Name>().unwrap();
        let look = |project: &Name, index| races.missed(project, &name(index), Instant::now());
        for index in 0..2 * MOST_PER_PROJECT {
            assert!(matches!(look(&greedy, index), Missed::Tell));
            drop(races.begin(&greedy, &name(MOST_PER_PROJECT + index), "a"));
        }
        assert!(races.lock()[&greedy].len() <= MOST_PER_PROJECT);
        assert!(matches!(look(&other, 1), Missed::Tell));
        assert!(matches!(look(&other, 1), Missed::Wait(_)), "it is watched");
    }
}
