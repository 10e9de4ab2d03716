// On a narrow screen one of the two is shown at a time.

export function startViews() {
  const buttons = [...document.querySelectorAll(".views button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.dataset.show;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
    });
  }
}
