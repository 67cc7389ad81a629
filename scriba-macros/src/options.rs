//! The options inside `#[projection(…)]`, `#[events(…)]`, `#[event(…)]` and `#[table(…)]`: one parser for them all.

use proc_macro2::Span;
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{Attribute, Error, Expr, ExprLit, ExprPath, Ident, Lit, LitInt, LitStr, Meta, Path, Result, Token};

/// An option that an attribute knows.
pub(crate) struct Known {
    /// Its name; [`BARE`] for a text without a name.
    pub(crate) key: &'static str,
    /// How it is written.
    pub(crate) usage: &'static str,
    /// Whether it may be given several times.
    pub(crate) repeatable: bool,
}

impl Known {
    pub(crate) const fn once(key: &'static str, usage: &'static str) -> Self {
        Self { key, usage, repeatable: false }
    }
}

/// The key of a text that stands without a name, as in `#[event("order-placed")]`.
pub(crate) const BARE: &str = "";

/// What the attributes of one item say.
pub(crate) struct Options {
    attribute: &'static str,
    known: &'static [Known],
    given: Vec<Given>,
}

struct Given {
    key: String,
    span: Span,
    value: Option<Expr>,
}

impl Parse for Given {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        if input.peek(Lit) {
            let value = value(input)?;
            return Ok(Self { key: BARE.to_owned(), span: value.span(), value: Some(value) });
        }
        let key = input.call(Ident::parse_any)?;
        let value = if input.parse::<Option<Token![=]>>()?.is_some() { Some(value(input)?) } else { None };
        Ok(Self { key: key.to_string(), span: key.span(), value })
    }
}

/// A value, out of the invisible group in which a macro that wrote the attribute hands on what it was given.
fn value(input: ParseStream<'_>) -> Result<Expr> {
    let mut value = input.parse()?;
    while let Expr::Group(group) = value {
        value = *group.expr;
    }
    Ok(value)
}

impl Options {
    /// Reads all attributes of this name, refusing unknown options and second ones.
    pub(crate) fn parse(attrs: &[Attribute], attribute: &'static str, known: &'static [Known]) -> Result<Self> {
        let mut options = Self { attribute, known, given: Vec::new() };
        for attr in attrs.iter().filter(|attr| attr.path().is_ident(attribute)) {
            let Meta::List(list) = &attr.meta else {
                return Err(Error::new(attr.span(), format!("options go in parentheses: {}", options.usage())));
            };
            for given in list.parse_args_with(Punctuated::<Given, Token![,]>::parse_terminated)? {
                options.push(given)?;
            }
        }
        Ok(options)
    }

    fn push(&mut self, given: Given) -> Result<()> {
        let Some(known) = self.known.iter().find(|known| known.key == given.key) else {
            let what = if given.key == BARE {
                "a value without a name".to_owned()
            } else {
                format!("unknown option `{}`", given.key)
            };
            return Err(Error::new(given.span, format!("{what}; the options are {}", self.usage())));
        };
        if !known.repeatable && self.given.iter().any(|other| other.key == given.key) {
            let what =
                if given.key == BARE { "a second value".to_owned() } else { format!("`{}` is given twice", given.key) };
            return Err(Error::new(given.span, format!("{what}: leave one of them out")));
        }
        self.given.push(given);
        Ok(())
    }

    /// All options as they are written.
    fn usage(&self) -> String {
        let usages: Vec<_> = self.known.iter().map(|known| known.usage).collect();
        format!("#[{}({})]", self.attribute, usages.join(", "))
    }

    fn refuse(&self, given: &Given, wanted: &str) -> Error {
        let usage = self.known.iter().find(|known| known.key == given.key).map_or("", |known| known.usage);
        let span = given.value.as_ref().map_or(given.span, Spanned::span);
        Error::new(span, format!("{wanted} is wanted here: write #[{}({usage})]", self.attribute))
    }

    fn find(&self, key: &str) -> Option<&Given> {
        self.given.iter().find(|given| given.key == key)
    }

    fn text_of(&self, given: &Given) -> Result<LitStr> {
        match &given.value {
            Some(Expr::Lit(ExprLit { lit: Lit::Str(text), .. })) => Ok(text.clone()),
            _ => Err(self.refuse(given, "a text")),
        }
    }

    /// The text given for an option, if any.
    pub(crate) fn text(&self, key: &str) -> Result<Option<LitStr>> {
        self.find(key).map(|given| self.text_of(given)).transpose()
    }

    /// The texts given for a repeatable option.
    pub(crate) fn texts(&self, key: &str) -> Result<Vec<LitStr>> {
        self.given.iter().filter(|given| given.key == key).map(|given| self.text_of(given)).collect()
    }

    /// The number given for an option, if any.
    pub(crate) fn number(&self, key: &str) -> Result<Option<LitInt>> {
        self.find(key)
            .map(|given| match &given.value {
                Some(Expr::Lit(ExprLit { lit: Lit::Int(number), .. })) => Ok(number.clone()),
                _ => Err(self.refuse(given, "a whole number")),
            })
            .transpose()
    }

    /// The path given for an option, if any.
    pub(crate) fn path(&self, key: &str) -> Result<Option<ExprPath>> {
        self.find(key)
            .map(|given| match &given.value {
                Some(Expr::Path(path)) => Ok(path.clone()),
                _ => Err(self.refuse(given, "the path of a function, without quotes,")),
            })
            .transpose()
    }

    /// Where an option without a value stands, if it does.
    pub(crate) fn flag(&self, key: &str) -> Result<Option<Span>> {
        self.find(key)
            .map(|given| match &given.value {
                None => Ok(given.span),
                Some(_) => Err(self.refuse(given, "no value")),
            })
            .transpose()
    }

    /// The crate that the generated code names: the one given by `crate`, or the default.
    pub(crate) fn krate(&self, default: &str) -> Result<Path> {
        match self.text("crate")? {
            Some(path) => path.parse().map_err(|_| {
                Error::new(
                    path.span(),
                    format!("{:?} is no path: write it like crate = \"my_crate::module\"", path.value()),
                )
            }),
            None => syn::parse_str(default),
        }
    }
}
