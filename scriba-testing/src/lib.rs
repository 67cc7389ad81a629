//! Testing kit for Scriba.
