//! Callers that want to create the same sandbox at the same time.
//!
//! Their `getOrCreate` is two requests: a get, and a create when that found nothing. A client whose
//! create succeeds takes itself for the creator and runs its `onCreate`; a client whose create is
//! refused fails. No answer to a create makes a client fetch the sandbox instead. So it is decided
//! at the get:
//!
//! - The first get that finds nothing is answered so, and its caller is expected to create
//!   ([`LEASE`]). The expectation ends earlier when somebody creates, and when the caller seems to do
//!   something else: its connection closes ([`CLOSED`]), or brings another get of the name
//!   ([`ASKED_AGAIN`]).
//! - Every other get waits, until the sandbox exists and can be returned, or until it is clear that
//!   nobody creates it: then one of the waiting callers is the next to get "not found".
//!
//! So of twenty callers at once one creates and runs `onCreate`, and nineteen find the sandbox. A
//! client that only checks whether a sandbox exists may wait for as long as another one is expected
//! to create it.
//!
//! A create of a name that is taken, or is just being made, is refused, as their service does,
//! unless it repeats one whose caller was cut off before it had the answer: their clients ask again
//! by themselves when a connection breaks. Such a caller waits and is handed the sandbox. A repeated
//! create has the same wishes, the same key and the same address as the first. While the caller of
//! the first is still connected, nobody repeats it: the second is another client's, and if both
//! succeeded both would run `onCreate`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use sandkeep_core::model::Name;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::connections::Via;

/// How long after a get that found nothing its create may come.
const LEASE: Duration = Duration::from_secs(30);
/// How long it may still come after the connection of the get was closed: clients close those that
/// they have not used for some seconds.
const CLOSED: Duration = Duration::from_secs(10);
/// How long after the get it may come from a client that asks for the same name again, on the same
/// connection: it probably only looks.
const ASKED_AGAIN: Duration = Duration::from_secs(2);
/// How long a get waits while others are expected to create.
const WAIT_FOR_OTHERS: Duration = Duration::from_secs(60);
/// How often a waiting get looks whether a connection was closed.
const LOOK: Duration = Duration::from_millis(250);
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
    times: Times,
}

/// How long others are waited for.
#[derive(Debug, Clone, Copy)]
struct Times {
    lease: Duration,
    closed: Duration,
    asked_again: Duration,
    others: Duration,
    look: Duration,
}

impl Default for Races {
    fn default() -> Self {
        let times = Times {
            lease: LEASE,
            closed: CLOSED,
            asked_again: ASKED_AGAIN,
            others: WAIT_FOR_OTHERS,
            look: LOOK,
        };
        Self { all: Arc::default(), times }
    }
}

/// A client found nothing and is expected to create.
#[derive(Debug)]
struct CreateLease {
    began: Instant,
    until: Instant,
    /// The connection of its get, until that is closed.
    holder: Option<Via>,
}

impl CreateLease {
    fn new(holder: &Via, times: Times) -> Self {
        let began = Instant::now();
        Self { began, until: began + times.lease, holder: Some(holder.clone()) }
    }

    /// Whether it still holds; not for long any more if its connection was closed.
    fn holds(&mut self, times: Times) -> bool {
        let now = Instant::now();
        if self.holder.take_if(|holder| !holder.is_open()).is_some() {
            self.until = self.until.min(now + times.closed);
        }
        self.until > now
    }

    /// Another get came on this connection.
    fn asked(&mut self, via: &Via, times: Times) {
        if self.holder.as_ref().is_some_and(|holder| holder.is(via)) {
            self.until = self.until.min(self.began + times.asked_again);
        }
    }
}

#[derive(Debug, Default)]
struct Runners {
    /// Somebody who found nothing.
    expected: Option<CreateLease>,
    /// How many creates are under way.
    creates: usize,
    /// Creates whose callers never got the answer.
    unheard: Vec<(Instant, String)>,
    /// Wakes the waiting callers to look again.
    changed: watch::Sender<()>,
}

impl Runners {
    /// Forgets what is too old to matter; whether anything is left.
    fn tidy(&mut self, times: Times) -> bool {
        self.expected.take_if(|lease| !lease.holds(times));
        self.unheard.retain(|(at, _)| at.elapsed() < AGAIN);
        self.expected.is_some() || !self.unheard.is_empty() || self.creates > 0
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
}

/// The caller of a create, until it has the answer.
#[derive(Debug)]
pub(crate) struct CreateCaller {
    races: Races,
    place: SandboxKey,
    wishes: String,
    /// It repeats one that had not delivered its answer.
    repeats: bool,
    answered: bool,
}

impl Races {
    fn lock(&self) -> MutexGuard<'_, Watched> {
        self.all.lock()
    }

    /// A get that came at `since`, on this connection, found nothing.
    pub(crate) fn missed(&self, project: &Name, name: &Name, since: Instant, via: &Via) -> Missed {
        let mut all = self.lock();
        if !has_room(&mut all, project, name, self.times) {
            return Missed::Tell;
        }
        let runners = all.entry(project.clone()).or_default().entry(name.clone()).or_default();
        if let Some(lease) = &mut runners.expected {
            lease.asked(via, self.times);
        }
        runners.tidy(self.times);
        let until = match &runners.expected {
            _ if runners.creates > 0 => since + WAIT_FOR_CREATE,
            Some(lease) => lease.until.min(since + self.times.others),
            None => since,
        };
        let now = Instant::now();
        if until <= now {
            runners.expected = Some(CreateLease::new(via, self.times));
            return Missed::Tell;
        }
        let until = until.min(now + self.times.look);
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
        runners.tidy(self.times);
        runners.expected = None;
        let unheard = runners.unheard.iter().position(|(_, other)| other == wishes);
        let repeats = unheard.map(|at| runners.unheard.swap_remove(at)).is_some();
        runners.creates += 1;
        // Those who wait for it to begin now wait for it to end.
        runners.changed.send_replace(());
        drop(all);
        let (races, wishes) = (self.clone(), wishes.to_owned());
        let running = CreateInProgress { races: races.clone(), place: place.clone() };
        (running, CreateCaller { races, place, wishes, repeats, answered: false })
    }
}

impl CreateCaller {
    /// The caller has its answer, and will not ask again. Returns whether it may get an existing
    /// sandbox.
    pub(crate) fn answered(&mut self) -> bool {
        self.answered = true;
        self.repeats
    }
}

impl Drop for CreateCaller {
    fn drop(&mut self) {
        if !self.answered {
            let mut all = self.races.lock();
            let (project, name) = &self.place;
            // More than may be watched are not: such a caller is refused when it asks again.
            if !has_room(&mut all, project, name, self.races.times) {
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
        runners.creates = runners.creates.saturating_sub(1);
        runners.changed.send_replace(());
        if !runners.tidy(self.races.times) {
            names.remove(name);
        }
        if names.is_empty() {
            all.remove(project);
        }
    }
}

/// Whether a name is watched or may be. What does not matter any more is forgotten where it takes the place of others.
fn has_room(all: &mut Watched, project: &Name, name: &Name, times: Times) -> bool {
    let mine = all.get(project);
    if mine.is_some_and(|names| names.contains_key(name)) {
        return true;
    }
    if mine.is_some_and(|names| names.len() >= MOST_PER_PROJECT)
        && let Some(names) = all.get_mut(project)
    {
        names.retain(|_, runners| runners.tidy(times));
        if names.len() >= MOST_PER_PROJECT {
            return false;
        }
    }
    if all.values().map(HashMap::len).sum::<usize>() >= MOST {
        all.retain(|_, names| {
            names.retain(|_, runners| runners.tidy(times));
            !names.is_empty()
        });
        return all.values().map(HashMap::len).sum::<usize>() < MOST;
    }
    true
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use sandkeep_core::model::Name;
    use tokio::time::Instant;

    use super::{CreateCaller, MOST_PER_PROJECT, Missed, Races, Times};
    use crate::connections::{Connections, Slot, Via};
    use crate::limits::Limits;

    const MS: Duration = Duration::from_millis(1);
    const TIMES: Times = Times {
        lease: Duration::from_millis(1_200),
        closed: Duration::from_millis(500),
        asked_again: Duration::from_millis(150),
        others: Duration::from_millis(2_400),
        look: Duration::from_millis(10),
    };

    fn quick() -> Races {
        Races { times: TIMES, ..Races::default() }
    }

    fn names() -> (Name, Name) {
        ("p".parse().unwrap(), "n".parse().unwrap())
    }

    /// A connection, open until it is dropped.
    fn connection() -> Arc<Slot> {
        Connections::new(&Limits::default()).admit(None).expect("the first")
    }

    /// A create whose work is done at once.
    fn create(races: &Races, wishes: &str) -> CreateCaller {
        let (project, name) = names();
        races.begin(&project, &name, wishes).1
    }

    fn look(races: &Races, on: &Arc<Slot>) -> Missed {
        let (project, name) = names();
        races.missed(&project, &name, Instant::now(), &Via::new(on))
    }

    /// Waits as a get does; how long it took until it was told that there is nothing.
    async fn until_told(races: &Races, on: &Arc<Slot>) -> Duration {
        let (project, name) = names();
        let since = Instant::now();
        while let Missed::Wait(changed) = races.missed(&project, &name, since, &Via::new(on)) {
            changed.wait().await;
            assert!(since.elapsed() < TIMES.others * 2, "it waits without end");
        }
        since.elapsed()
    }

    #[tokio::test]
    async fn one_is_told_that_there_is_nothing_and_the_others_wait_for_its_create() {
        let (project, name) = names();
        let (races, a, b) = (quick(), connection(), connection());
        assert!(matches!(look(&races, &a), Missed::Tell));
        let Missed::Wait(second) = look(&races, &b) else { panic!("told too") };
        let (running, mut first) = races.begin(&project, &name, "a");
        second.wait().await;
        // Longer than any caller is expected to take before it begins.
        let since = Instant::now();
        while since.elapsed() < TIMES.others + 100 * MS {
            let Missed::Wait(second) = look(&races, &b) else { panic!("told while it is made") };
            second.wait().await;
        }
        drop(running);
        assert!(!first.answered());
    }

    #[tokio::test]
    async fn who_does_not_create_is_waited_for_as_long_as_it_may_take() {
        let (races, a, b) = (quick(), connection(), connection());
        assert!(matches!(look(&races, &a), Missed::Tell));
        let waited = until_told(&races, &b).await;
        assert!(waited + 50 * MS > TIMES.lease, "{waited:?}");
    }

    #[tokio::test]
    async fn who_is_gone_is_waited_for_less() {
        let (races, a, b) = (quick(), connection(), connection());
        assert!(matches!(look(&races, &a), Missed::Tell));
        drop(a);
        let waited = until_told(&races, &b).await;
        assert!(waited + 50 * MS > TIMES.closed && waited < TIMES.lease, "{waited:?}");
    }

    #[tokio::test]
    async fn who_asks_again_and_again_hardly_waits_for_itself() {
        let (races, a) = (quick(), connection());
        assert!(matches!(look(&races, &a), Missed::Tell));
        let waited = until_told(&races, &a).await;
        assert!(waited < TIMES.closed, "{waited:?}");
        tokio::time::sleep(TIMES.asked_again).await;
        let waited = until_told(&races, &a).await;
        assert!(waited < 50 * MS, "{waited:?}");
    }

    #[tokio::test]
    async fn however_many_are_told_first_no_caller_waits_without_end() {
        let (project, name) = names();
        let (races, a, b) = (quick(), connection(), connection());
        assert!(matches!(look(&races, &a), Missed::Tell));
        let since = Instant::now();
        while let Missed::Wait(changed) = races.missed(&project, &name, since, &Via::new(&b)) {
            changed.wait().await;
            // Another one is faster as often as it can.
            let _ = look(&races, &a);
            assert!(since.elapsed() < TIMES.others * 2, "it waits without end");
        }
    }

    #[tokio::test]
    async fn a_create_that_fails_lets_the_next_one_try() {
        let (project, name) = names();
        let (races, a, b) = (Races::default(), connection(), connection());
        assert!(matches!(look(&races, &a), Missed::Tell));
        let (running, mut first) = races.begin(&project, &name, "a");
        let Missed::Wait(second) = look(&races, &b) else { panic!("told while it is made") };
        drop(running);
        first.answered();
        second.wait().await;
        assert!(matches!(look(&races, &b), Missed::Tell));
    }

    #[test]
    fn an_equal_create_of_another_client_is_no_repetition() {
        let (project, name) = names();
        let races = Races::default();
        let (running, mut first) = races.begin(&project, &name, "a");
        assert!(!create(&races, "a").answered(), "while the first is under way");
        assert!(!create(&races, "b").answered());
        first.answered();
        drop(running);
        assert!(!create(&races, "a").answered(), "a plain mistake");
    }

    #[test]
    fn who_was_cut_off_may_ask_again_once_also_while_its_create_is_under_way() {
        let (project, name) = names();
        let races = Races::default();
        let (running, first) = races.begin(&project, &name, "a");
        drop(first);
        assert!(!create(&races, "b").answered(), "somebody else");
        assert!(create(&races, "a").answered());
        drop(running);
        assert!(!create(&races, "a").answered());
        let all = races.lock();
        assert!(all.values().flatten().all(|(_, runners)| runners.creates == 0));
    }

    #[test]
    fn a_project_does_not_take_the_places_of_others() {
        let races = Races::default();
        let (a, b) = (connection(), connection());
        let (greedy, other): (Name, Name) = ("greedy".parse().unwrap(), "other".parse().unwrap());
        let name = |index: usize| format!("n{index}").parse::<Name>().unwrap();
        let look = |project: &Name, index, on: &Arc<Slot>| {
            races.missed(project, &name(index), Instant::now(), &Via::new(on))
        };
        for index in 0..2 * MOST_PER_PROJECT {
            assert!(matches!(look(&greedy, index, &a), Missed::Tell));
            drop(races.begin(&greedy, &name(MOST_PER_PROJECT + index), "a"));
        }
        assert!(races.lock()[&greedy].len() <= MOST_PER_PROJECT);
        assert!(matches!(look(&other, 1, &a), Missed::Tell));
        assert!(matches!(look(&other, 1, &b), Missed::Wait(_)), "it is watched");
    }
}
