//! Single flight: work that is done once for all callers that ask for it at the same time.

use std::collections::HashMap;
use std::hash::Hash;

use parking_lot::Mutex;
use tokio::sync::watch;

/// The outcome of work that several callers wait for; `None` until it is known.
pub(in crate::engine) type Outcome<T> = watch::Receiver<Option<T>>;

/// Work in progress, by key: callers that ask for the same meanwhile get the same outcome.
#[derive(Debug)]
pub(in crate::engine) struct SingleFlight<K, T>(Mutex<HashMap<K, Outcome<T>>>);

impl<K, T> Default for SingleFlight<K, T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash + Clone, T: Clone> SingleFlight<K, T> {
    /// Joins the work for a key. The second value is for the first caller alone: the sender of the
    /// outcome.
    pub(in crate::engine) fn join(
        &self,
        key: &K,
    ) -> (Outcome<T>, Option<watch::Sender<Option<T>>>) {
        let mut under_way = self.0.lock();
        if let Some(outcome) = under_way.get(key) {
            return (outcome.clone(), None);
        }
        let (tell, outcome) = watch::channel(None);
        under_way.insert(key.clone(), outcome.clone());
        (outcome, Some(tell))
    }

    /// The next caller for a key begins anew.
    pub(in crate::engine) fn finish(&self, key: &K) {
        self.0.lock().remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::SingleFlight;

    #[tokio::test]
    async fn who_asks_meanwhile_gets_the_same_outcome() {
        let flights: SingleFlight<u8, &str> = SingleFlight::default();
        let (mut first, tell) = flights.join(&1);
        let (mut second, nobody) = flights.join(&1);
        assert!(nobody.is_none());
        tell.expect("the first does the work").send_replace(Some("done"));
        for outcome in [&mut first, &mut second] {
            assert_eq!(*outcome.wait_for(Option::is_some).await.unwrap(), Some("done"));
        }
        flights.finish(&1);
        assert!(flights.join(&1).1.is_some(), "the next begins anew");
    }
}
