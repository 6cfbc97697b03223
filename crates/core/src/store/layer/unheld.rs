//! Collects layers that nothing holds: finds them, moves them to the trash, deletes them.

use std::collections::HashSet;

use crate::failpoint;
use crate::model::{Layer, LayerId, Timestamp};
use crate::store::manifest::{id_of, list};
use crate::store::{Result, Store, StoreError, blocking};

/// A layer that nothing holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unheld {
    /// The layer.
    pub id: LayerId,
    /// The space it takes.
    pub bytes: u64,
}

/// What a collection removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// The layers.
    pub layers: Vec<LayerId>,
    /// The space they took.
    pub bytes: u64,
}

impl Store {
    /// Lists the layers that are not in `live` and are older than `begun_before`: sealed ones by when they were
    /// sealed, open ones by when they were begun. A layer whose manifest cannot be read is left for `fsck`.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn unheld(
        &self,
        live: &HashSet<LayerId>,
        begun_before: Timestamp,
    ) -> Result<Vec<Unheld>> {
        let (store, live) = (self.clone(), live.clone());
        blocking(move || {
            let mut unheld = Vec::new();
            for path in list(&store.layers_dir())? {
                let Ok(id) = id_of(&path).parse::<LayerId>() else { continue };
                if live.contains(&id) {
                    continue;
                }
                let (since, bytes) = match store.get::<Layer>(&id) {
                    Ok(layer) => (layer.sealed_at, layer.bytes),
                    Err(StoreError::NotFound { .. }) => (time_of(id.as_str()), 0),
                    Err(_) => continue,
                };
                if since < begun_before {
                    unheld.push(Unheld { id, bytes });
                }
            }
            Ok(unheld)
        })
        .await
    }

    /// Moves a layer to the trash that nothing holds. `named` returns whether some manifest
    /// references it; it is called before the move, together with all holds, and once more after
    /// it. False when the layer stays.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`]; the layer is then where it was.
    pub async fn discard_unheld(
        &self,
        id: &str,
        named: impl Fn() -> bool + Send + 'static,
    ) -> Result<bool> {
        if !self.inner.holds.begin_move(id) {
            return Ok(false);
        }
        // Asked after it was marked: a hold that ended before that has its manifest written by now.
        if named() {
            self.inner.holds.end_move(id);
            return Ok(false);
        }
        let (store, id) = (self.clone(), id.to_owned());
        blocking(move || {
            failpoint::pass("store.collect.before");
            store.trash_layer(&id, named)
        })
        .await
    }

    /// Moves all layers to the trash that are not in `live` and are older than `begun_before`, see
    /// [`unheld`](Self::unheld), and deletes them. Returns when the space is free. For who is alone with the store.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn collect(
        &self,
        live: &HashSet<LayerId>,
        begun_before: Timestamp,
    ) -> Result<Collected> {
        let mut collected = Collected::default();
        for Unheld { id, bytes } in self.unheld(live, begun_before).await? {
            self.inner.holds.unprotect(id.as_str());
            if self.discard_unheld(id.as_str(), || false).await? {
                collected.bytes += bytes;
                collected.layers.push(id);
            }
        }
        for trashed in self.trash().await? {
            if trashed.layer().is_some() {
                self.purge(&trashed).await?;
            }
        }
        let store = self.clone();
        blocking(move || {
            store.wait_for_deletions();
            Ok(())
        })
        .await?;
        Ok(collected)
    }
}

/// The time that is part of every id.
pub(in crate::store) fn time_of(id: &str) -> Timestamp {
    const ALPHABET: &[u8] = b"0123456789abcdefghjkmnpqrstvwxyz";
    let digits = id.bytes().skip("lay-".len()).take(10);
    let value = |byte| ALPHABET.iter().position(|known| *known == byte).unwrap_or(0) as i64;
    let millis = digits.fold(0, |sum, byte| sum * 32 + value(byte));
    Timestamp::from_millisecond(millis).unwrap_or(Timestamp::MIN)
}

#[cfg(test)]
mod tests {
    use super::time_of;
    use crate::model::{LayerId, now};

    #[test]
    fn an_id_tells_when_it_was_made() {
        let before = now();
        let id = LayerId::fresh();
        let at = time_of(id.as_str());
        assert!(before <= at && at <= now(), "{at}");
    }
}
