//! The drivers of this host. Some may be added later: `keep microvm setup` prepares a host whose
//! server runs.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use crate::driver::Driver;
use crate::engine::{Absent, Error, Result};

/// How long the answer of [`LateDrivers`] holds. Callers may ask for an absent driver as often as they like.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Looks again whether this host has what an absent driver needs.
pub trait LateDrivers: fmt::Debug + Send + Sync {
    /// The driver of this name, or why it is absent still. `None` for a name that it does not know.
    ///
    /// Called while a caller waits, so it should look at a few files and no more. Once it has answered with a driver it is
    /// not asked for that one again.
    fn look(&self, name: &str) -> Option<std::result::Result<Arc<dyn Driver>, Absent>>;
}

/// The drivers that there are, and why others are absent.
pub(in crate::engine) struct DriverSet {
    present: RwLock<BTreeMap<&'static str, Arc<dyn Driver>>>,
    absent: BTreeMap<&'static str, Absent>,
    late: Option<Arc<dyn LateDrivers>>,
    /// What the last look for each driver found, and when.
    looks: Mutex<BTreeMap<String, (Instant, Absent)>>,
}

impl DriverSet {
    pub(in crate::engine) fn new(
        present: Vec<Arc<dyn Driver>>,
        absent: BTreeMap<&'static str, Absent>,
        late: Option<Arc<dyn LateDrivers>>,
    ) -> Self {
        let present = present.into_iter().map(|driver| (driver.name(), driver)).collect();
        Self { present: RwLock::new(present), absent, late, looks: Mutex::default() }
    }

    /// The driver of this name, also if it has come since the start.
    pub(in crate::engine) fn get(&self, name: &str) -> Result<Arc<dyn Driver>> {
        if let Some(driver) = self.present.read().get(name) {
            return Ok(Arc::clone(driver));
        }
        let asked = || name.to_owned();
        match self.look(name) {
            Some(Ok(driver)) => Ok(driver),
            Some(Err(Absent { reason, fix })) => {
                Err(Error::AbsentDriver { asked: asked(), reason, fix })
            }
            None => match self.absent.get(name).cloned() {
                Some(Absent { reason, fix }) => {
                    Err(Error::AbsentDriver { asked: asked(), reason, fix })
                }
                None => Err(Error::NoDriver { asked: asked(), have: self.names() }),
            },
        }
    }

    /// Those that there are now.
    pub(in crate::engine) fn all(&self) -> Vec<Arc<dyn Driver>> {
        self.present.read().values().cloned().collect()
    }

    /// The names of those that there are now.
    pub(in crate::engine) fn names(&self) -> Vec<&'static str> {
        self.present.read().keys().copied().collect()
    }

    fn look(&self, name: &str) -> Option<std::result::Result<Arc<dyn Driver>, Absent>> {
        let late = self.late.as_ref()?;
        // One looks; the others wait for what it finds.
        let mut looks = self.looks.lock();
        if let Some(driver) = self.present.read().get(name) {
            return Some(Ok(Arc::clone(driver)));
        }
        if let Some((at, absent)) = looks.get(name)
            && at.elapsed() < LOOK_AGAIN
        {
            return Some(Err(absent.clone()));
        }
        match late.look(name)? {
            Ok(driver) => {
                looks.remove(name);
                tracing::info!(driver = driver.name(), "a driver is available from now on");
                self.present.write().insert(driver.name(), Arc::clone(&driver));
                Some(Ok(driver))
            }
            Err(absent) => {
                looks.insert(name.to_owned(), (Instant::now(), absent.clone()));
                Some(Err(absent))
            }
        }
    }
}
