//! What was refused, written down without letting a sandbox fill the journal.
//!
//! The same refusal within a second is counted and told once, with the count. And no more than [`MOST`] different ones are
//! told in a second; of the rest only the number is.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::model::Protocol;
use crate::net::ledger::{Facts, Ledger};

const WINDOW: Duration = Duration::from_secs(1);
const MOST: usize = 100;

#[derive(Debug)]
pub(in crate::net) struct Refusals {
    ledger: Arc<Ledger>,
    window: Mutex<Option<Window>>,
}

type Key = (Protocol, Option<SocketAddr>, Option<String>, String);

/// What was refused since the window was opened.
#[derive(Debug)]
struct Window {
    opened: Instant,
    repeats: HashMap<Key, u64>,
    beyond: u64,
}

impl Refusals {
    pub(in crate::net) fn new(ledger: Arc<Ledger>) -> Arc<Self> {
        Arc::new(Self { ledger, window: Mutex::new(None) })
    }

    /// Something is refused.
    pub(in crate::net) fn add(self: &Arc<Self>, facts: Facts) {
        let mut window = self.window();
        if window.as_ref().is_some_and(|window| window.opened.elapsed() >= WINDOW) {
            let over = window.take();
            drop(window);
            self.tell(over);
            window = self.window();
        }
        let open = window.get_or_insert_with(|| {
            self.close_later();
            Window { opened: Instant::now(), repeats: HashMap::new(), beyond: 0 }
        });
        let key = (facts.protocol, facts.to, facts.name.clone(), facts.rule.clone());
        if let Some(repeats) = open.repeats.get_mut(&key) {
            *repeats += 1;
        } else if open.repeats.len() < MOST {
            open.repeats.insert(key, 0);
            drop(window);
            self.ledger.refused(facts, None);
        } else {
            open.beyond += 1;
        }
    }

    /// Tells what was counted and not told yet.
    pub(in crate::net) fn flush(&self) {
        let over = self.window().take();
        self.tell(over);
    }

    /// Counts are told also when nothing follows that would bring them up.
    fn close_later(self: &Arc<Self>) {
        let this: Weak<Self> = Arc::downgrade(self);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                tokio::time::sleep(WINDOW).await;
                if let Some(this) = this.upgrade() {
                    let mut window = this.window();
                    let over = window.take_if(|window| window.opened.elapsed() >= WINDOW);
                    drop(window);
                    this.tell(over);
                }
            });
        }
    }

    fn tell(&self, over: Option<Window>) {
        let Some(Window { repeats, beyond, .. }) = over else { return };
        for ((protocol, to, name, rule), count) in repeats {
            if count > 0 {
                let detail = format!("{count} more within a second");
                self.ledger.refused(Facts { protocol, to, name, rule }, Some(detail));
            }
        }
        if beyond > 0 {
            let rule = "too many refusals to list".to_owned();
            let facts = Facts { protocol: Protocol::Tcp, to: None, name: None, rule };
            self.ledger.refused(facts, Some(format!("{beyond} more within a second")));
        }
    }

    fn window(&self) -> MutexGuard<'_, Option<Window>> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
