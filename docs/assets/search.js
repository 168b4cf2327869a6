// The index takes a word that begins with a dash for one to leave out, so an option is searched by its name alone.
document.addEventListener("input", (event) => {
  if (event.target.matches("[data-md-component=search-query]"))
    event.target.value = event.target.value.replace(/(^|\s)--?(?=\w)/g, "$1")
}, { capture: true })
