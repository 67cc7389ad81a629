//! Questions beside the subscription, on a connection of their own.

use async_trait::async_trait;
use scriba_core::source::{PassedOver, SourceError, SourceInspector, TypeSet};
use scriba_core::{EventId, Position};
use sqlx::postgres::PgConnection;
use sqlx::{query, query_as, query_scalar};

use crate::catalog::Catalog;
use crate::error::{answer, source_error};
use crate::row::event_id;

pub(crate) struct Inspector {
    connection: PgConnection,
    catalog: Catalog,
}

impl Inspector {
    pub(crate) fn new(connection: PgConnection, catalog: Catalog) -> Self {
        Self { connection, catalog }
    }
}

#[async_trait]
impl SourceInspector for Inspector {
    async fn head(&mut self) -> Result<Option<Position>, SourceError> {
        let asked = query_scalar(self.catalog.texts.head.clone()).fetch_one(&mut self.connection);
        let head: Option<i64> = answer(&self.catalog.name, "read the head", asked).await?;
        head.map(Position::from_i64).transpose().map_err(SourceError::unusable)
    }

    async fn event_id_at(&mut self, position: Position) -> Result<Option<EventId>, SourceError> {
        let Ok(number) = position.to_i64() else { return Ok(None) };
        let asked = query(self.catalog.texts.id_at.clone()).bind(number).fetch_optional(&mut self.connection);
        match answer(&self.catalog.name, format!("read the event at position {position}"), asked).await? {
            Some(row) => event_id(&row, self.catalog.kinds.id),
            None => Ok(None),
        }
    }

    async fn passed_over(&mut self, types: TypeSet<'_>, up_to: Position) -> Result<Option<PassedOver>, SourceError> {
        let (text, types) = match types {
            TypeSet::Only(types) => (&self.catalog.texts.passed_over, types),
            TypeSet::AllBut(types) => (&self.catalog.texts.passed_over_but, types),
        };
        let up_to = up_to.to_i64().map_err(SourceError::unusable)?;
        // No limit of time: it may have to look through the whole log.
        let found: Option<(String, i64, i64)> = query_as(text.clone())
            .bind(up_to)
            .bind(types)
            .fetch_optional(&mut self.connection)
            .await
            .map_err(|error| source_error(&self.catalog.name, "look for events of added types", &error))?;
        let Some((event_type, events, first)) = found else { return Ok(None) };
        let first = Position::from_i64(first).map_err(SourceError::unusable)?;
        Ok(Some(PassedOver { event_type: event_type.into(), events: events.cast_unsigned(), first }))
    }
}
