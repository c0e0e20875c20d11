(() => {
'use strict';
// Puts the newest state of the page in its place, each second. Without scripts the
// page is asked for again as a whole.
const main = document.querySelector('main');
let lost = 0;
const look = async () => {
  try {
    const answer = await fetch(location.href, {cache: 'no-store'});
    if (!answer.ok) throw new Error(String(answer.status));
    const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
    main.replaceChildren(...page.querySelector('main').childNodes);
    document.title = page.title;
    lost = 0;
  } catch {
    if (++lost === 3) {
      const note = document.createElement('p');
      note.className = 'outcome';
      note.textContent = 'echelon watch has ended: this page no longer moves';
      main.prepend(note);
    }
  }
  setTimeout(look, document.hidden ? 5000 : 1000);
};
setTimeout(look, 1000);
})();
